"""Cases of moe_router: chosen routes and given ones, with ties; large is Qwen3-30B-A3B's, 8 of 128 experts."""

from __future__ import annotations

from types import ModuleType

import torch

from rlk_ledger_kernels.dtypes import DType, torch_dtype
from rlk_ledger_kernels.ops.moe_router import reference
from rlk_ledger_kernels.ops.moe_router.contract import MoeRouterContract, Weighting
from rlk_ledger_kernels.suite.case import Case, RowCase, Rows, Wrong

_SHAPES = {"small": (150, 37, 4), "large": (4097, 128, 8)}


def cases(size: str = "small") -> list[Case]:
    """Every weighting; routes chosen from the logits, and routes given (replayed)."""
    rows, experts, top_k = _SHAPES[size]
    chosen = [
        ("float32", MoeRouterContract(top_k)),
        ("bfloat16", MoeRouterContract(top_k, output="bfloat16")),
        ("bfloat16", MoeRouterContract(top_k, "softmax_of_top_k", output="bfloat16")),
        ("float16", MoeRouterContract(top_k, "softmax", output="float16")),
    ]
    given: list[tuple[DType, Weighting]] = [("float32", "softmax_renormalised"), ("bfloat16", "softmax_of_top_k")]
    return [
        *(_case(rows, experts, dtype, contract, given=False) for dtype, contract in chosen),
        *(_case(rows, experts, dtype, MoeRouterContract(top_k, how, output=dtype), given=True) for dtype, how in given),
    ]


def wrong() -> list[Wrong]:
    """A router whose sum over experts depends on how many rows there are."""
    contract = MoeRouterContract(4)
    right = _case(150, 37, "float32", contract, given=False)

    def by_population(module: ModuleType, operands: Rows) -> torch.Tensor:
        """Softmax over the experts in an order that depends on the number of rows."""
        (logits_NE,) = operands
        weights_NT, experts_NT = reference.moe_router(logits_NE, contract)
        p_NE = torch.exp(logits_NE - logits_NE.amax(1, keepdim=True))
        parts = torch.split(p_NE, 4 if len(logits_NE) < 32 else 16, dim=1)
        total_N = torch.zeros(len(logits_NE), dtype=torch.float32)
        for part in parts:
            total_N = total_N + part.cumsum(1)[:, -1]
        return torch.cat((p_NE.gather(1, experts_NT) / total_N[:, None], experts_NT.to(weights_NT.dtype)), dim=1)

    mistake = "the sum over experts is cut by the number of rows"
    return [
        Wrong(
            "invariance", mistake, RowCase("moe_router", mistake, "float32", right.rows, by_population, right.reference)
        )
    ]


def _case(rows: int, experts: int, dtype: str, contract: MoeRouterContract, given: bool) -> RowCase:
    generator = torch.Generator().manual_seed(rows + experts)
    logits_NE = (torch.randn((rows, experts), generator=generator, dtype=torch.float32) * 2).to(torch_dtype(dtype))
    logits_NE[::5, 3] = logits_NE[::5, 1]  # ties
    cotangent_T = torch.randn((contract.top_k,), generator=generator, dtype=torch.float32)
    routes = torch.stack([torch.randperm(experts, generator=generator)[: contract.top_k] for _ in range(rows)])

    def run(module: ModuleType, operands: Rows) -> torch.Tensor:
        if given:
            replayed: torch.Tensor = module.routed_weights(operands[0], operands[1], contract)
            return replayed
        weights_NT, experts_NT = module.moe_router(operands[0], contract)
        return torch.cat((weights_NT, experts_NT.to(weights_NT.dtype)), dim=1)

    def gradient(module: ModuleType, operands: Rows) -> torch.Tensor:
        experts_NT = operands[1] if given else module.moe_router(operands[0], contract)[1]
        grad_NT = cotangent_T.to(operands[0].device).expand(experts_NT.shape)
        grad_NE: torch.Tensor = module.moe_router_backward(grad_NT, operands[0], experts_NT, contract)
        return grad_NE

    how = "given routes" if given else "chosen"
    name = f"{rows} x {experts}, top {contract.top_k}, {contract.weighting}, {how}, {dtype}"
    operands = (logits_NE, routes) if given else (logits_NE,)
    return RowCase("moe_router", name, dtype, operands, run, lambda rows: run(reference, rows), gradient)
