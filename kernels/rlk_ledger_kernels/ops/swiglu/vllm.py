"""swiglu, vLLM's own kernel: y = silu(gate) * up, rounded where this build of vLLM rounds.

Opportunistic: where silu(gate) is rounded is vLLM's own choice, so `materialise` is kept only where the bitwise probe
says so. The two operands are laid side by side first, as the kernel reads them.
"""

from __future__ import annotations

import torch

from rlk_ledger_kernels.errors import OperandError
from rlk_ledger_kernels.native_operands import function, library, same_dtype
from rlk_ledger_kernels.ops.swiglu.contract import SwigluContract

_VECTOR = 8
"""Elements vLLM's CPU kernel takes at a time; it refuses rows that are no multiple."""


def swiglu(gate: torch.Tensor, up: torch.Tensor, contract: SwigluContract) -> torch.Tensor:
    """Gate.

    gate, up: one shape [..., W] and one dtype; rows that are no multiple of 8 are padded with zeros. Returns that shape
    and dtype. Raises OperandError for other operands, ContractError for another output dtype, BackendError without
    vLLM.
    """
    if gate.shape != up.shape:
        raise OperandError(f"swiglu: gate is {tuple(gate.shape)}, up is {tuple(up.shape)}; make them equal")
    same_dtype("swiglu with vllm", contract.output, gate, up)
    library("vllm", "vllm._custom_ops")
    kernel = function("vllm", torch.ops._C, "silu_and_mul")
    width = gate.shape[-1]
    missing = -width % _VECTOR
    joined = torch.cat([torch.nn.functional.pad(one, (0, missing)) for one in (gate, up)], dim=-1)
    out = torch.empty((*gate.shape[:-1], width + missing), dtype=gate.dtype, device=gate.device)
    if out.numel():
        kernel(out, joined)
    return out[..., :width].contiguous()
