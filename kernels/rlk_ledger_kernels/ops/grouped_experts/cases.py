"""Cases of grouped_experts: tokens spread over experts and crowded on few; large is Qwen3-30B-A3B's layer."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType

import torch

from rlk_ledger_kernels.dtypes import DType, torch_dtype
from rlk_ledger_kernels.ops.grouped_experts import reference
from rlk_ledger_kernels.ops.grouped_experts.contract import GroupedExpertsContract
from rlk_ledger_kernels.schedule import Schedule
from rlk_ledger_kernels.suite.case import Case, RowCase, Rows, Wrong


@dataclass(frozen=True)
class _Shape:
    rows: int
    experts: int
    top_k: int
    inner: int
    hidden: int
    used: int
    """Experts that get tokens; the rest stay empty."""


_SHAPES = {
    "small": (_Shape(150, 8, 3, 48, 40, used=8), _Shape(130, 8, 2, 40, 33, used=3)),
    "large": (_Shape(1025, 128, 8, 768, 2048, used=128), _Shape(1025, 128, 8, 768, 2048, used=9)),
}


def cases(size: str = "small") -> list[Case]:
    """Both ways of rounding a weighted result, in float32 and bfloat16."""
    spread, crowded = _SHAPES[size]
    schedule = Schedule(k_leaf=1024) if size == "large" else Schedule()  # a GPU wants long leaves
    fused = GroupedExpertsContract(output="bfloat16", weighted="kernel", combine="output", schedule=schedule)
    return [
        _case(spread, GroupedExpertsContract(schedule=schedule)),
        _case(spread, GroupedExpertsContract(output="bfloat16", schedule=schedule)),
        _case(crowded, fused),
    ]


def wrong() -> list[Wrong]:
    """Experts combined by column instead of by expert, in an order that depends on the neighbours."""
    contract = GroupedExpertsContract()
    right = _case(_SHAPES["small"][0], contract)
    weights = _weights(_SHAPES["small"][0], "float32")

    def most_crowded_first(module: ModuleType, operands: Rows) -> torch.Tensor:
        """Add the results of the expert with most tokens first."""
        x_NH, weights_NT, experts_NT = operands
        parts_NTH = reference.expert_partials(x_NH, reference.pack_experts(*weights, contract), experts_NT)
        parts_NTH = parts_NTH * weights_NT[:, :, None]
        order_NT = torch.bincount(experts_NT.reshape(-1), minlength=8)[experts_NT].argsort(1, descending=True)
        total_NH = torch.zeros_like(x_NH)
        for column in range(experts_NT.shape[1]):
            total_NH = total_NH + parts_NTH[torch.arange(len(x_NH)), order_NT[:, column]]
        return total_NH

    mistake = "experts are combined by how many tokens they have"
    case = RowCase("grouped_experts", mistake, "float32", right.rows, most_crowded_first, right.reference)
    return [Wrong("invariance", mistake, case)]


def _weights(shape: _Shape, dtype: DType) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(shape.inner)
    wide = (shape.experts, shape.inner, shape.hidden)
    gate_EIH, up_EIH = (
        torch.randn(wide, generator=generator, dtype=torch.float32) * shape.hidden**-0.5 for _ in range(2)
    )
    down_EHI = (
        torch.randn((shape.experts, shape.hidden, shape.inner), generator=generator, dtype=torch.float32)
        * shape.inner**-0.5
    )
    wanted = torch_dtype(dtype)
    return gate_EIH.to(wanted), up_EIH.to(wanted), down_EHI.to(wanted)


def _case(shape: _Shape, contract: GroupedExpertsContract) -> RowCase:
    dtype = contract.output
    generator = torch.Generator().manual_seed(shape.rows)
    x_NH = torch.randn((shape.rows, shape.hidden), generator=generator, dtype=torch.float32).to(torch_dtype(dtype))
    routes = [torch.randperm(shape.used, generator=generator)[: shape.top_k] for _ in range(shape.rows)]
    weights_NT = (
        torch.randn((shape.rows, shape.top_k), generator=generator, dtype=torch.float32)
        .softmax(1)
        .to(torch_dtype(dtype))
    )
    cotangent_H = torch.randn((shape.hidden,), generator=generator, dtype=torch.float32)
    weights = _weights(shape, dtype)
    packs: dict[tuple[str, torch.device], object] = {}

    def packed(module: ModuleType, device: torch.device) -> object:
        key = (module.__name__, device)
        if key not in packs:
            packs[key] = module.pack_experts(*(one.to(device) for one in weights), contract)
        return packs[key]

    def run(module: ModuleType, operands: Rows) -> torch.Tensor:
        x, held, experts_NT = operands
        y_NH: torch.Tensor = module.grouped_experts(x, packed(module, x.device), held, experts_NT)
        return y_NH

    def gradient(module: ModuleType, operands: Rows) -> torch.Tensor:
        x, held, experts_NT = operands
        grad_NH = cotangent_H.to(x.device).expand(x.shape)
        grads = module.grouped_experts_backward(grad_NH, x, packed(module, x.device), held, experts_NT)
        return torch.cat(grads[:2], dim=1)

    name = (
        f"{shape.rows} x {shape.hidden}, {shape.top_k} of {shape.used} experts x {shape.inner}, {dtype}, "
        f"{contract.weighted}"
    )
    operands = (x_NH, weights_NT, torch.stack(routes))
    return RowCase("grouped_experts", name, dtype, operands, run, lambda rows: run(reference, rows), gradient)
