"""The numeric contract of a mixture-of-experts router, and the checks that every backend shares."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch

from rlk_ledger_kernels.dtypes import DType, one_of, torch_dtype
from rlk_ledger_kernels.errors import ContractError, OperandError
from rlk_ledger_kernels.schedule import Schedule

Weighting = Literal["softmax", "softmax_renormalised", "softmax_of_top_k"]


@dataclass(frozen=True)
class MoeRouterContract:
    """Chooses the `top_k` experts of largest logit and weighs them.

    Experts come by falling logit; equal logits (+0 and -0 are equal) by rising expert index. A NaN logit is chosen
    after every number; the weights of its row are NaN, and so are those of a row whose largest logit is infinite.
    weighting: `softmax` over all experts; `softmax_renormalised`: divided by the sum over the chosen ones (Hugging
        Face's norm_topk_prob); `softmax_of_top_k`: softmax over the chosen logits alone.
    router_precision: dtype that logits, probabilities and weights are each rounded to; exponentials, sums and
        quotients are float32 either way. Sums over experts take them by expert index, so the same set of experts has
        the same weights in any order of columns. output: dtype of the weights.
    """

    top_k: int
    weighting: Weighting = "softmax_renormalised"
    router_precision: DType = "float32"
    output: DType = "float32"
    tie_break: Literal["lowest_index"] = "lowest_index"
    schedule: Schedule = field(default_factory=Schedule)

    def __post_init__(self) -> None:
        """Refuse unknown names."""
        if self.top_k < 1:
            raise ContractError(f"moe_router.top_k is {self.top_k}; choose at least 1")
        weightings = ("softmax", "softmax_renormalised", "softmax_of_top_k")
        one_of("moe_router.weighting", self.weighting, weightings)
        one_of("moe_router.tie_break", self.tie_break, ("lowest_index",))
        torch_dtype(self.router_precision)
        torch_dtype(self.output)


def checked_logits(logits_NE: torch.Tensor, contract: MoeRouterContract) -> None:
    """Raise OperandError when `logits_NE` is no matrix of floats with at least `top_k` experts."""
    if logits_NE.dim() != 2 or not logits_NE.is_floating_point() or logits_NE.shape[1] < contract.top_k:
        raise OperandError(
            f"moe_router: logits are {logits_NE.dtype} {tuple(logits_NE.shape)}; "
            f"top {contract.top_k} needs floats [rows, at least {contract.top_k} experts]"
        )


def checked_experts(experts_NT: torch.Tensor, logits_NE: torch.Tensor, contract: MoeRouterContract) -> None:
    """Raise OperandError unless `experts_NT` is int64 [rows, top_k] of different experts that the logits have."""
    (rows, experts), columns = logits_NE.shape, contract.top_k
    if experts_NT.shape != (rows, columns) or experts_NT.dtype != torch.int64:
        raise OperandError(
            f"moe_router: experts are {experts_NT.dtype} {tuple(experts_NT.shape)}; pass int64 [{rows}, {columns}]"
        )
    if experts_NT.numel() == 0:
        return
    rising_NT = experts_NT.sort(1).values
    if int(rising_NT[:, 0].min()) < 0 or int(rising_NT[:, -1].max()) >= experts:
        raise OperandError(f"moe_router: a route names an expert outside 0..{experts - 1}; check the recorded routes")
    if columns > 1 and bool((rising_NT[:, 1:] == rising_NT[:, :-1]).any()):
        raise OperandError("moe_router: a row names one expert twice; check the recorded routes")
