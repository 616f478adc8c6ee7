"""swiglu, vLLM's own kernel: y = silu(gate) * up, rounded where this build of vLLM rounds.

Opportunistic: where silu(gate) is rounded is vLLM's own choice, so `materialise` is kept only where the bitwise probe
says so. The two operands are laid side by side first, as the kernel reads them.
"""

from __future__ import annotations

import torch

from rlk_ledger_kernels.errors import OperandError
from rlk_ledger_kernels.native_operands import function, library, same_dtype
from rlk_ledger_kernels.ops.swiglu.contract import SwigluContract


def swiglu(gate: torch.Tensor, up: torch.Tensor, contract: SwigluContract) -> torch.Tensor:
    """Gate.

    gate, up: one shape [..., W] and one dtype. Returns that shape and dtype. Raises OperandError for other operands,
    ContractError for another output dtype, BackendError without vLLM.
    """
    if gate.shape != up.shape:
        raise OperandError(f"swiglu: gate is {tuple(gate.shape)}, up is {tuple(up.shape)}; make them equal")
    same_dtype("swiglu with vllm", contract.output, gate, up)
    library("vllm", "vllm._custom_ops")
    kernel = function("vllm", torch.ops._C, "silu_and_mul")
    joined = torch.cat((gate, up), dim=-1)
    out = torch.empty_like(gate, memory_format=torch.contiguous_format)
    if out.numel():
        kernel(out, joined)
    return out
