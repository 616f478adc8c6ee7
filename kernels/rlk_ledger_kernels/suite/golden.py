"""Golden bits: one SHA-256 per operator, case and backend, recorded for a class of device.

Within a class the bits must be the recorded ones. A class or a case nobody recorded is `not_recorded`, never a pass:
across classes the claim is a tolerance, and that is what the accuracy suite is for.
"""

from __future__ import annotations

import hashlib
import json
import platform
import re
from functools import cache
from pathlib import Path
from types import ModuleType

import torch

from rlk_ledger_kernels.bits import bits
from rlk_ledger_kernels.fingerprint import installed
from rlk_ledger_kernels.suite.accuracy import gradients, outputs
from rlk_ledger_kernels.suite.case import Case, moved
from rlk_ledger_kernels.suite.quiet import quiet

RECORDED = Path(__file__).parent / "recorded"
"""One file a device class, `<class>.json`: operator -> backend -> case -> digest."""

Bits = dict[str, dict[str, dict[str, str]]]


def device_class(device: str, needs: tuple[str, ...] = ()) -> str:
    """What bits may depend on beside source and contract, as a file name.

    needs: distributions the backend imports beside torch. CPU: vendor and family, instruction set in use, torch and
    MKL; kernels of Triton run in its interpreter there, which rests on numpy and is a class of its own. CUDA: compute
    capability, torch and its CUDA.
    """
    build = f"torch-{torch.__version__}"
    others = [f"{name}-{installed(name) or 'absent'}" for name in needs if name != "torch"]
    if device == "cuda" and torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability()
        return _file_name("-".join([f"cuda-{major}.{minor}", build, f"cuda-{torch.version.cuda}", *others]))
    if device != "cpu":
        return _file_name("-".join([device, build, *others]))
    processor = [_processor(), torch.backends.cpu.get_cpu_capability(), build, _mkl()]
    if "triton" in needs:
        return _file_name("-".join(["interpreter", *processor, *others, f"numpy-{installed('numpy')}"]))
    return _file_name("-".join(["cpu", *processor, *others]))


@quiet()
def fingerprint(case: Case, module: ModuleType, device: str = "cpu") -> str:
    """`sha256:` over shape, dtype and bits of what a backend gives for a case, and of its gradient where it has one."""
    case = moved(case, device)
    digest = hashlib.sha256()
    with torch.no_grad():
        results = [outputs(case, module)]
    gradient = gradients(case, module)
    if gradient is not None:
        results.append(gradient.detach())
    for result in results:
        digest.update(f"{result.dtype} {tuple(result.shape)}\n".encode())
        digest.update(bits(result.cpu()).numpy().tobytes())
    return f"sha256:{digest.hexdigest()}"


def recorded(name: str, folder: Path | None = None) -> Bits | None:
    """What was recorded for a device class, or None where nobody did."""
    path = (folder or RECORDED) / f"{name}.json"
    if not path.is_file():
        return None
    read: Bits = json.loads(path.read_text())
    return read


def save(name: str, measured: Bits, folder: Path | None = None) -> Path:
    """Write the bits of one device class, keeping those of backends that were not measured; returns the file."""
    folder = folder or RECORDED
    folder.mkdir(parents=True, exist_ok=True)
    merged = recorded(name, folder) or {}
    for operator, backends in measured.items():
        merged[operator] = {**merged.get(operator, {}), **backends}
    path = folder / f"{name}.json"
    path.write_text(json.dumps(merged, indent=1, sort_keys=True) + "\n")
    return path


def _file_name(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9._+-]+", "_", text)


@cache
def _processor() -> str:
    """Vendor and family of the CPU: BLAS picks its path by them as well as by instruction set."""
    try:
        told = dict(line.split(":", 1) for line in Path("/proc/cpuinfo").read_text().splitlines() if ":" in line)
    except OSError:
        return platform.machine()
    facts = {key.strip(): value.strip() for key, value in told.items()}
    return f"{facts.get('vendor_id', platform.machine())}-family-{facts.get('cpu family', 'unknown')}"


@cache
def _mkl() -> str:
    found = re.search(r"Math Kernel Library Version ([\d.]+)", torch.__config__.show())
    return f"mkl-{found[1]}" if found else "no-mkl"
