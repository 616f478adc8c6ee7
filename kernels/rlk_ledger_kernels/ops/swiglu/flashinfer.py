"""swiglu, flashinfer: y = silu(gate) * up, rounded where this build of flashinfer rounds.

Opportunistic: where silu(gate) is rounded is flashinfer's own choice, so `materialise` is kept only where the bitwise
probe says so. The two operands are laid side by side first, as the kernel reads them.
"""

from __future__ import annotations

import torch

from rlk_ledger_kernels.errors import OperandError
from rlk_ledger_kernels.native_operands import function, library, on_cuda, same_dtype
from rlk_ledger_kernels.ops.swiglu.contract import SwigluContract

_GRANULE = 16


def swiglu(gate: torch.Tensor, up: torch.Tensor, contract: SwigluContract) -> torch.Tensor:
    """Gate.

    gate, up: one shape [..., W] and one dtype, on CUDA; rows that do not fill 16-byte units are padded with zeros.
    Returns that shape and dtype. Raises OperandError for other operands, ContractError for another output dtype,
    BackendError without flashinfer or off CUDA.
    """
    if gate.shape != up.shape:
        raise OperandError(f"swiglu: gate is {tuple(gate.shape)}, up is {tuple(up.shape)}; make them equal")
    same_dtype("swiglu with flashinfer", contract.output, gate, up)
    on_cuda("flashinfer", "swiglu", gate)
    kernel = function("flashinfer", library("flashinfer", "flashinfer.activation"), "silu_and_mul")
    width = gate.shape[-1]
    missing = -width % (_GRANULE // gate.element_size())
    joined = torch.cat([torch.nn.functional.pad(one, (0, missing)) for one in (gate, up)], dim=-1)
    out = torch.empty((*gate.shape[:-1], width + missing), dtype=gate.dtype, device=gate.device)
    if out.numel():
        kernel(joined, out=out, enable_pdl=False)
    return out[..., :width].contiguous()
