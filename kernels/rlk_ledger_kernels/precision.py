"""Float32 products that are float32: no TF32, no bfloat16 shortcuts, no autocast, whatever the job has switched on.

Training jobs set these process-wide switches for speed. A product with a contract turns them off for itself and puts
back what it found; when nothing is on, nothing is touched.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

_EXACT = ("none", "ieee")


@contextmanager
def exact_products(device: torch.device) -> Iterator[None]:
    """Run the body with float32 products in IEEE arithmetic on `device`, and restore every switch afterwards."""
    backend = _product_switches(device)
    with ExitStack() as stack:
        if torch.is_autocast_enabled(device.type):
            stack.enter_context(torch.autocast(device.type, enabled=False))
        if backend.fp32_precision not in _EXACT or _everywhere().fp32_precision not in _EXACT:
            stack.enter_context(_held(backend, "fp32_precision", "ieee"))
        if device.type == "cuda":
            for switch in ("allow_fp16_reduced_precision_reduction", "allow_bf16_reduced_precision_reduction"):
                if getattr(backend, switch):
                    stack.enter_context(_held(backend, switch, False))
        yield


def _everywhere() -> Any:
    return torch.backends  # its stubs lack the precision switches


def _product_switches(device: torch.device) -> Any:
    return torch.backends.cuda.matmul if device.type == "cuda" else _everywhere().mkldnn.matmul


@contextmanager
def _held(owner: object, name: str, value: object) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def cublas_workspace() -> str:
    """What CUBLAS_WORKSPACE_CONFIG says about repeatable cuBLAS calls, in words for a probe's reason."""
    config = os.environ.get("CUBLAS_WORKSPACE_CONFIG", "")
    if config in (":4096:8", ":16:8"):
        return f"CUBLAS_WORKSPACE_CONFIG={config}"
    told = f"is {config!r}" if config else "is not set"
    return f"CUBLAS_WORKSPACE_CONFIG {told}; set it to :4096:8 so that streams share no workspace"
