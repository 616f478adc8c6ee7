"""Whether Triton kernels can run in this process, answered without importing a kernel.

On a GPU they are compiled. On a CPU they run in Triton's interpreter, which is for checking and never for speed, and
only when TRITON_INTERPRET=1 was set before the first kernel was imported.
"""

from __future__ import annotations

import os
from importlib.util import find_spec

import torch


def interpreted() -> bool:
    """Whether kernels defined from now on run in Triton's interpreter."""
    return os.environ.get("TRITON_INTERPRET", "") == "1"


def unavailable(device: str) -> str | None:
    """Why no Triton kernel can run on `device` (a torch device type), with what would change it; None when one can."""
    if find_spec("triton") is None:
        return "triton is not installed; pip install triton"
    if device == "cuda":
        if interpreted():
            return "TRITON_INTERPRET=1 is set; unset it to compile for the GPU"
        return None if torch.cuda.is_available() else "torch sees no CUDA device"
    if device == "cpu":
        return None if interpreted() else "Triton has no CPU backend; set TRITON_INTERPRET=1 to check kernels here"
    return f"Triton kernels are written for cuda, not for {device}"
