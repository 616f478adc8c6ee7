"""What a writer's numbers depend on, captured through an allowlist: never a dump of the environment.

Only modules the job has already imported are asked; nothing is imported here, and CUDA is never initialised.
"""

import os
import platform
import re
import sys
from typing import Any

_VARIABLES = frozenset(
    {
        "CUBLAS_WORKSPACE_CONFIG",
        "CUDA_DEVICE_MAX_CONNECTIONS",
        "MKL_CBWR",
        "MKL_NUM_THREADS",
        "NCCL_ALGO",
        "NCCL_PROTO",
        "NVIDIA_TF32_OVERRIDE",
        "OMP_NUM_THREADS",
        "PYTHONHASHSEED",
        "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
        "VLLM_BATCH_INVARIANT",
    }
)
_PREFIXES = ("NVTE_",)
_LONGEST = 256
_PINNED = ("flash_attn", "flashinfer", "megatron.core", "numpy", "safetensors", "sglang", "transformers", "triton")
_PINNED_ENGINES = ("transformer_engine", "trl", "verl", "vllm")


def capture() -> dict[str, Any]:
    """The environment value of `writer.opened`: python, torch build, pins and determinism variables."""
    found: dict[str, Any] = {"python": platform.python_version()}
    pins = [{"package": name, "version": v} for name in _PINNED + _PINNED_ENGINES if (v := _version(name))]
    if pins:
        found["pins"] = pins
    variables = {k: v[:_LONGEST] for k, v in os.environ.items() if k in _VARIABLES or k.startswith(_PREFIXES)}
    if variables:
        found["variables"] = variables
    torch = sys.modules.get("torch")
    if torch is not None:
        found.update(_torch(torch))
    return found


def _version(name: str) -> str | None:
    version = getattr(sys.modules.get(name), "__version__", None)
    return version if isinstance(version, str) else None


def _torch(torch: Any) -> dict[str, Any]:
    """Version, build and backend flags of an imported torch; whatever it refuses to say is left out."""
    found: dict[str, Any] = {}
    try:
        found["torch"] = str(torch.__version__)
        commit = getattr(torch.version, "git_version", None)
        if isinstance(commit, str) and re.fullmatch(r"[0-9a-f]+", commit):
            found["torch_build"] = "git:" + commit
        if getattr(torch.version, "cuda", None):
            found["cuda"] = str(torch.version.cuda)
        found["backend_flags"] = {
            "deterministic_algorithms": bool(torch.are_deterministic_algorithms_enabled()),
            "cudnn_deterministic": bool(torch.backends.cudnn.deterministic),
            "cudnn_benchmark": bool(torch.backends.cudnn.benchmark),
            "float32_matmul_precision": str(torch.get_float32_matmul_precision()),
            "num_threads": int(torch.get_num_threads()),
        }
        if torch.cuda.is_initialized():
            found["device"] = str(torch.cuda.get_device_name())
            found["capability"] = ".".join(map(str, torch.cuda.get_device_capability()))
    except (AttributeError, RuntimeError, TypeError, ImportError):
        pass
    return found
