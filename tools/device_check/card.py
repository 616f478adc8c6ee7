"""Which card this is and what it can do: names and versions, measured copy bandwidth, measured matmul rate."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys

import torch

from device_check.clock import Clock
from device_check.report import Row
from rlk_ledger_kernels.fingerprint import installed
from rlk_ledger_kernels.triton_device import interpreted

_ASKED = ("driver_version", "clocks.sm", "clocks.mem", "clocks.max.sm", "power.limit", "pstate")
_DISTRIBUTIONS = ("triton", "vllm", "flashinfer-python", "transformer-engine", "liger-kernel", "batch-invariant-ops")


def environment(device: str) -> dict[str, str]:
    """Everything a reader needs to compare two results; what cannot be asked is `unknown`."""
    facts = {
        "card": torch.cuda.get_device_name() if device == "cuda" else platform.processor() or platform.machine(),
        "torch": str(torch.__version__),
        "cuda": str(torch.version.cuda),
        "python": platform.python_version(),
        "triton runs": "interpreted" if interpreted() else "compiled",
        "system": platform.platform(),
        "cores": str(os.cpu_count()),
    }
    if device == "cuda":
        about = torch.cuda.get_device_properties(torch.cuda.current_device())
        facts["capability"] = f"{about.major}.{about.minor}"
        facts["multiprocessors"] = str(about.multi_processor_count)
        facts["memory"] = f"{about.total_memory / 2**30:.1f} GiB"
        facts |= _asked()
    facts |= {name: installed(name) or "absent" for name in _DISTRIBUTIONS}
    return facts


def rates(clock: Clock) -> list[Row]:
    """The copy bandwidth (bytes read and written) and the bfloat16 matmul rate of torch on this device."""
    large = clock.device == "cuda"
    source = torch.empty((1 << 30) if large else (1 << 20), dtype=torch.int8, device=clock.device)
    target = torch.empty_like(source)
    copy_ms = clock.median_ms(lambda: target.copy_(source))
    side = 8192 if large else 128
    a, b = (torch.randn((side, side), device=clock.device, dtype=torch.bfloat16) for _ in range(2))
    mm_ms = clock.median_ms(lambda: torch.mm(a, b))
    return [
        Row(
            section="rates",
            name="copy bandwidth",
            state="measured",
            value=2 * source.numel() / copy_ms / 1e6,
            unit="GB/s",
            detail=f"{source.numel() >> 20} MiB, read and written",
        ),
        Row(
            section="rates",
            name="bfloat16 matmul rate",
            state="measured",
            value=2 * side**3 / mm_ms / 1e9,
            unit="TFLOP/s",
            detail=f"torch.mm of {side} x {side}",
        ),
    ]


def copy_bandwidth(rows: list[Row]) -> float:
    """Bytes per second out of `rates`."""
    return next(float(row.value or 0.0) for row in rows if row.name == "copy bandwidth") * 1e9


def _asked() -> dict[str, str]:
    """What nvidia-smi says of the first visible card."""
    names = {"driver_version": "driver"}
    unknown = {names.get(one, one): "unknown" for one in _ASKED}
    if shutil.which("nvidia-smi") is None:
        return unknown
    which = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0] or "0"
    command = ["nvidia-smi", f"--query-gpu={','.join(_ASKED)}", "--format=csv,noheader", f"--id={which}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
        values = [value.strip() for value in done.stdout.strip().splitlines()[0].split(",")]
    except (OSError, subprocess.SubprocessError, IndexError) as error:
        print(f"nvidia-smi did not answer: {error}", file=sys.stderr)
        return unknown
    return {names.get(one, one): value for one, value in zip(_ASKED, values)}
