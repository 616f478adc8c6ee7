"""P3 inside the engines: what recording adds to a vLLM rollout process and to a Megatron training process.

    python tools/bench/p3_engine_cost.py [--engine vllm|megatron] [--model shipped|large] [--pairs N] [--json FILE]

Run by the interpreter that has the engines (`make bench-engines`). Without --engine, every engine runs on every model,
each in a process of its own. `shipped` is the demo's model, whose forward pass is so cheap that the recorder's share is
larger than in any real job; `large` has random weights and 106 M parameters. Off means: no method is wrapped, nothing
is announced. Both sides of a pair run the same samples in one process; the shipper is a process of its own and runs on
the other core, which the wall time sees.
"""

import argparse
import cProfile
import json
import os
import pstats
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ENGINES = ("vllm", "megatron")
SIZES = {
    ("vllm", "shipped"): (16, 128),
    ("vllm", "large"): (8, 32),
    ("megatron", "shipped"): (16, 128),
    ("megatron", "large"): (4, 32),
}
"""(samples, response tokens each) of a pass: about a second."""


def job(engine: str, folder: Path, scratch: Path, size: tuple[int, int]) -> Any:
    """The job of this engine on the model in `folder`."""
    if engine == "vllm":
        from inside_vllm import Rollout

        return Rollout(folder, *size)
    from inside_megatron import Training

    return Training(folder, scratch, *size)


def measure(engine: str, model: str, pairs: int, profile: bool) -> dict[str, Any]:
    """One engine on one model, in this process."""
    from interleaved import interleave, shipper_cpu, told
    from random_qwen3 import SHIPPED, write

    import rlk_ledger

    with tempfile.TemporaryDirectory(dir="/var/tmp") as where:
        scratch = Path(where)
        folder, parameters = (SHIPPED, 820_000) if model == "shipped" else (scratch / "m", write(scratch / "m"))
        timed = job(engine, folder, scratch, SIZES[engine, model])
        role = "rollout" if engine == "vllm" else "training"
        rlk_ledger.init(f"{where}/ledger", run_id="bench", role=role, roles={role: 1}, spool=f"{where}/spool")
        once = timed.attach()
        rlk_ledger.flush("committed", timeout=60)
        shipper = shipper_cpu(scratch / "spool")
        began = time.monotonic()
        found = interleave(timed.off, timed.on, timed.clock, pairs)
        rlk_ledger.flush("committed", timeout=60)
        lasted = time.monotonic() - began
        shipped = (shipper_cpu(scratch / "spool") - shipper) / lasted
        notes = {
            "shipper": f"{shipped * 1e3:.1f} ms CPU a second, in a process of its own",
            "once, at attach": f"{once['attach'] * 1e3:.0f} ms CPU",
            "at each load/publish": f"{once['weights'] * 1e3:.0f} ms CPU: the digest of what is held",
        }
        title = f"P3  {engine} {timed.version}, {model} model ({parameters / 1e6:.1f} M parameters)"
        document = told(title, found, timed.samples, timed.tokens, notes)
        if profile:
            _profiled(timed)
        rlk_ledger.close()
    return {"row": "P3", "engine": engine, "model": model, **document}


def _profiled(timed: Any) -> None:
    """Prints where one pass spends its time inside the recorder."""
    timed.on.prepare()
    profiler = cProfile.Profile()
    profiler.runcall(timed.on.run)
    pstats.Stats(profiler).sort_stats("tottime").print_stats("rlk_ledger", 25)


def each_in_a_process(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Runs every engine on every model."""
    found = []
    with tempfile.TemporaryDirectory() as where:
        for engine, model in SIZES:
            out = Path(where, "found.json")
            command = [sys.executable, __file__, "--engine", engine, "--model", model, "--pairs", str(options.pairs)]
            subprocess.run([*command, "--json", str(out)], check=True)
            found.append(json.loads(out.read_text()))
    return found


def main() -> None:
    """Prints the tables and writes the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=ENGINES)
    parser.add_argument("--model", choices=("shipped", "large"), default="shipped")
    parser.add_argument("--pairs", type=int, default=24)
    parser.add_argument("--profile", action="store_true", help="also where the recorder's time goes")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if options.engine is None:
        found: Any = each_in_a_process(options)
    else:
        found = measure(options.engine, options.model, options.pairs, options.profile)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
