"""swiglu, torch: silu from exp, division and addition.

`torch.nn.functional.silu` and `torch.sigmoid` on a CPU give other bits in the last few elements of a thread's
share than in the rest, so they depend on position; `torch.exp`, division and addition do not.
"""

from __future__ import annotations

import torch

from rlk_ledger_kernels.dtypes import torch_dtype
from rlk_ledger_kernels.ops.swiglu.contract import SwigluContract, check_operands


def swiglu(gate: torch.Tensor, up: torch.Tensor, contract: SwigluContract) -> torch.Tensor:
    """Gate: y = silu(gate) * up.

    gate, up: same shape, any float dtype. Returns that shape in `contract.output`.
    Raises OperandError when the shapes differ.
    """
    check_operands(gate, up)
    output = torch_dtype(contract.output)
    wide = gate.to(torch.float32)
    denominator = wide.neg().exp_().add_(1.0)
    activated = wide / denominator if contract.activation == "quotient" else wide * denominator.reciprocal_()
    if contract.materialise == "activation":
        return activated.to(output) * up.to(output)
    return (activated * up.to(torch.float32)).to(output)


def swiglu_backward(
    grad: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, contract: SwigluContract
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients: with s = 1 / (1 + exp(-gate)), dgate = g * up * s * (1 + gate * (1 - s)) and dup = g * silu(gate).

    The forward pass's roundings have gradient one. grad: gate's shape. Returns (dgate in gate's dtype, dup in up's).
    """
    check_operands(gate, up, grad)
    wide, wide_grad = gate.to(torch.float32), grad.to(torch.float32)
    denominator = wide.neg().exp_().add_(1.0)
    sigmoid = denominator.reciprocal()
    activated = wide / denominator if contract.activation == "quotient" else wide * sigmoid
    slope = ((1.0 - sigmoid).mul_(wide).add_(1.0)).mul_(sigmoid)
    grad_gate = (wide_grad * up.to(torch.float32)).mul_(slope)
    return grad_gate.to(gate.dtype), (wide_grad * activated).to(up.dtype)
