"""swiglu, torch: silu as gate / (1 + exp(-gate)).

`torch.nn.functional.silu` and `torch.sigmoid` on a CPU give other bits in the last few elements of a thread's
share than in the rest, so they depend on position; `torch.exp`, division and addition do not.
"""

from __future__ import annotations

import torch

from rlk_ledger_kernels.dtypes import torch_dtype
from rlk_ledger_kernels.errors import OperandError
from rlk_ledger_kernels.ops.swiglu.contract import SwigluContract


def swiglu(gate: torch.Tensor, up: torch.Tensor, contract: SwigluContract) -> torch.Tensor:
    """Gate.

    gate, up: same shape, any float dtype. Returns that shape in `contract.output`.
    Raises OperandError when the shapes differ.
    """
    if gate.shape != up.shape:
        raise OperandError(f"swiglu: gate is {tuple(gate.shape)}, up is {tuple(up.shape)}; they must be equal")
    output = torch_dtype(contract.output)
    wide = gate.to(torch.float32)
    activated = wide / wide.neg().exp_().add_(1.0)
    if contract.materialise == "activation":
        return activated.to(output) * up.to(output)
    return (activated * up.to(torch.float32)).to(output)
