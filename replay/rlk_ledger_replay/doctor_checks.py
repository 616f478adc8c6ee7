"""What `rlk-ledger doctor` says of replay: which arms and scorers can run here, and why not. Found by entry point.

An engine is looked for in the interpreter that would run it, in a process of its own with a time limit. That it can be
imported is all that is said of it: an import runs no operator. Of torch an operator is run, on every device.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator, Sequence
from typing import Any

from rlk_ledger.doctor.check import Check, State
from rlk_ledger_replay.arms import ARMS
from rlk_ledger_replay.scorers.engines import ENGINES, EngineSpec, parse_pythons
from rlk_ledger_schemas.errors import UsageError

TIMEOUT_S = 90.0
IMPORTS = {"vllm": "vllm", "megatron": "megatron.core", "transformers": "transformers"}

_TORCH = """
import json, torch
seen = {"version": torch.__version__, "devices": [], "failed": {}}
names = ["cpu"] + [f"cuda:{i}" for i in range(torch.cuda.device_count() if torch.cuda.is_available() else 0)]
for name in names:
    try:
        ones = torch.ones(64, 64, dtype=torch.bfloat16, device=name)
        if float((ones @ ones)[0, 0]) != 64.0:
            raise ArithmeticError("64 ones do not add up to 64")
        seen["devices"].append(name if name == "cpu" else f"{name} {torch.cuda.get_device_name(name)}")
    except Exception as error:
        seen["failed"][name] = f"{type(error).__name__}: {error}".splitlines()[0]
print("\\n" + json.dumps(seen))
"""
_IMPORT = """
import importlib, json, sys
module = importlib.import_module(sys.argv[1])
print("\\n" + json.dumps({"version": str(getattr(module, "__version__", "of unknown version"))}))
"""
_KERNELS = """
import json, torch
from rlk_ledger_kernels.capabilities import capabilities
device = "cuda" if torch.cuda.is_available() else "cpu"
found = [[one.operator, one.backend, one.runs, one.reason, one.enable, one.ran]
         for one in capabilities(device)]
print("\\n" + json.dumps({"device": device, "found": found}))
"""


def checks() -> Iterator[Check]:
    """The reference decoder, its arms and its kernels, then each live engine."""
    try:
        pythons = parse_pythons(())
    except UsageError as error:
        yield Check("scorer interpreters", "fail", str(error), "set RLK_SCORER_PYTHON right, or unset it")
        return
    yield from reference(pythons["reference"])
    yield kernels(pythons["reference"])
    for name, spec in ENGINES.items():
        if name != "reference":
            yield live(spec, pythons[name])


def reference(python: str, timeout_s: float = TIMEOUT_S) -> Iterator[Check]:
    """Torch by running an operator on each device, and the four arms, which need nothing else."""
    seen, why = _asked(python, ["-c", _TORCH], timeout_s)
    arms = ", ".join(ARMS)
    if seen is None:
        state: State = "unknown" if why.startswith("no answer") else "note"
        yield Check("torch", state, why, 'pip install "rlk-ledger[replay]"')
        yield Check(
            "replay arms", state, f"of {arms} only both_native can be told, by `audit`: the reference needs torch"
        )
        return
    devices = ", ".join(str(device) for device in seen["devices"]) or "no device"
    for device, reason in dict(seen["failed"]).items():
        yield Check("torch", "fail", f"{device}: {reason}", "the driver or this build of torch does not fit the device")
    if not seen["devices"]:
        yield Check("replay arms", "fail", f"none of {arms}: torch {seen['version']} multiplies on no device")
        return
    yield Check("torch", "ok", f"torch {seen['version']} multiplied on {devices}")
    yield Check("replay arms", "ok", f"{arms} by the reference decoder")


def kernels(python: str, timeout_s: float = TIMEOUT_S) -> Check:
    """Which backends of the deterministic operators ran a case here, and what would enable the others."""
    seen, why = _asked(python, ["-c", _KERNELS], timeout_s)
    name = "kernel backends"
    if seen is None:
        state: State = "unknown" if why.startswith("no answer") else "note"
        return Check(name, state, f"no operator was run: {why}", 'pip install "rlk-ledger[replay]"')
    backends: dict[str, list[list[Any]]] = {}
    for row in seen["found"]:
        backends.setdefault(str(row[1]), []).append(row)
    ran, absent, enable = [], [], {}
    for backend, rows in backends.items():
        count = sum(bool(row[2]) for row in rows)
        failed = next((row for row in rows if row[5] and not row[2]), None)
        if count:
            ran.append(f"{backend} ran {count} of {len(rows)} operators")
        else:
            absent.append(f"{backend} ({rows[0][3]})")
            enable[backend] = str(rows[0][4])
        if failed is not None and backend in ("torch", "reference"):
            return Check(name, "fail", f"{backend} does not run {failed[0]} on {seen['device']}: {failed[3]}")
    text = f"on {seen['device']}: {', '.join(ran)}" + (f"; not here: {', '.join(absent)}" if absent else "")
    return Check(name, "ok", text, "; ".join(f"{one}: {how}" for one, how in enable.items() if how) or None)


def live(spec: EngineSpec, python: str, timeout_s: float = TIMEOUT_S) -> Check:
    """Whether a live engine's package can be imported by its interpreter; nothing of it is run."""
    seen, why = _asked(python, ["-c", _IMPORT, IMPORTS[spec.name]], timeout_s)
    name = f"scorer {spec.name}"
    if seen is None:
        state: State = "unknown" if why.startswith("no answer") else "note"
        return Check(name, state, f"not for --scorer {spec.name}: {why}", f"{spec.install}, or RLK_SCORER_PYTHON")
    text = f"{spec.name} {seen['version']} is importable, not run, by {python}"
    return Check(name, "note", text, f"`rlk-ledger replay --scorer {spec.name}` runs it and its guards")


def _asked(python: str, arguments: Sequence[str], timeout_s: float) -> tuple[dict[str, Any] | None, str]:
    """(the JSON document on the last line of what an interpreter printed, or None and why there is none)."""
    try:
        done = subprocess.run(
            [python, *arguments],
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired:
        return None, f"no answer within {timeout_s:g} s from {python}"
    except OSError as error:
        return None, f"{python} cannot be run: {error.strerror}"
    try:
        return dict(json.loads(done.stdout.strip().splitlines()[-1])), ""
    except (IndexError, ValueError):
        last = done.stderr.strip().splitlines()
        return None, f"{last[-1] if last else f'it ended with {done.returncode}'} ({python})"
