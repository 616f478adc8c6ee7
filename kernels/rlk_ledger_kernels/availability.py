"""Whether a backend could run in this process, asked of installed metadata and of torch; nothing is imported for it."""

from __future__ import annotations

import torch

from rlk_ledger_kernels import triton_device
from rlk_ledger_kernels.descriptors import Backend
from rlk_ledger_kernels.fingerprint import installed
from rlk_ledger_kernels.request import Objection


def unavailable(backend: Backend, device: str | None) -> Objection | None:
    """What `backend` lacks here, with what would enable it; None when it lacks nothing.

    device: the torch device type asked for; None asks about distributions only.
    """
    absent = [name for name in backend.needs if installed(name) is None]
    if absent:
        enable = backend.enable or f"pip install {' '.join(absent)}"
        return Objection("backend_unavailable", f"{', '.join(absent)} is not installed", enable)
    if device is None:
        return None
    if "triton" in backend.needs:
        reason = triton_device.unavailable(device)
        if reason is not None:
            what, _, how = reason.partition("; ")
            return Objection("backend_unavailable", what, how or backend.enable)
    if not present(device):
        return Objection("backend_unavailable", f"torch sees no {device} device", backend.enable)
    return None


def present(device: str) -> bool:
    """Whether torch can place a tensor on a device of this type."""
    if device == "cpu":
        return True
    module = getattr(torch, device, None)
    return bool(module is not None and hasattr(module, "is_available") and module.is_available())
