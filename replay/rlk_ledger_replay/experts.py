"""The mixture-of-experts MLP: a router, the experts, and routes recorded by another engine.

E experts, I intermediate, H hidden, P rows with padding, T chosen experts of a token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from rlk_ledger_kernels.errors import OperandError
from rlk_ledger_kernels.parallel.group import Group
from rlk_ledger_replay.feed import RankRows
from rlk_ledger_replay.model_settings import ExpertConfig
from rlk_ledger_replay.numerics import Numerics
from rlk_ledger_replay.operators import Operators


@dataclass(frozen=True)
class Experts:
    """The packed router of one layer, each tp rank's share of its experts, and the model's setting."""

    router: Any
    shares: tuple[Any, ...]
    config: ExpertConfig


@dataclass
class Routes:
    """Experts to use in place of the routers' own choice, and what became of them.

    given: by layer, int64 [N, T] over the packed rows of the pass; -1 in a row that was not recorded.
    chosen: by layer, what the routers chose, [rows, T] for each cp rank held here (filled by the pass).
    covered, agreeing: (row, layer) pairs that had a recorded route, and those where the router chose the same experts
    in any order.
    """

    given: Mapping[int, torch.Tensor] = field(default_factory=dict)
    chosen: dict[int, list[torch.Tensor]] = field(default_factory=dict)
    covered: int = 0
    agreeing: int = 0


def pack_experts(
    tensor: Callable[[str], torch.Tensor],
    at: str,
    config: ExpertConfig,
    numerics: Numerics,
    operators: Operators,
    tp: int,
    ranks: tuple[int, ...],
) -> Experts:
    """Pack one layer. tensor: reads a tensor by name; at: the layer's `mlp`; ranks: those of `tp` held here."""
    assert operators.grouped_experts is not None
    contract = numerics.experts_contract()
    gate_EIH, up_EIH, down_EHI = (
        torch.stack([tensor(f"{at}.experts.{expert}.{name}.weight") for expert in range(config.count)])
        for name in ("gate_proj", "up_proj", "down_proj")
    )
    pack = operators.grouped_experts.pack_expert_shard
    if tp == 1:
        shares = (operators.grouped_experts.pack_experts(gate_EIH, up_EIH, down_EHI, contract),)
    else:
        shares = tuple(pack(gate_EIH, up_EIH, down_EHI, contract, tp=(tp, rank)) for rank in ranks)
    router = operators.linear.pack_linear(tensor(f"{at}.gate.weight"), numerics.router_logits_contract())
    return Experts(router, shares, config)


def expert_mlp(
    hidden_PH: torch.Tensor,
    layer: Experts,
    numerics: Numerics,
    operators: Operators,
    tp: Group,
    rows: RankRows,
    pieces: Sequence[tuple[int, int]],
    index: int,
    routes: Routes | None,
) -> list[torch.Tensor]:
    """The layer's output, [P, H] cut into `pieces`. index: of the layer, by which `routes` knows it."""
    operator = operators.grouped_experts
    assert operator is not None
    weights_PT, experts_PT = _route(hidden_PH, layer, numerics, operators, rows, index, routes)
    if tp.size == 1:
        return [operator.grouped_experts(hidden_PH, layer.shares[0], weights_PT, experts_PT)]
    parts = [operator.expert_partials(hidden_PH, share, experts_PT) for share in layer.shares]
    gathered = tp.all_gather(parts, [rows.padded] * tp.size, "global_rank_index")
    contract, count = numerics.experts_contract(), layer.config.count
    return [
        operator.merge_experts(
            [part[a:b] for part in gathered], weights_PT[a:b], experts_PT[a:b], contract, count, tp=tp.size
        )
        for a, b in pieces
    ]


def _route(
    hidden_PH: torch.Tensor,
    layer: Experts,
    numerics: Numerics,
    operators: Operators,
    rows: RankRows,
    index: int,
    routes: Routes | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(weights, experts) of every row, [P, T]."""
    router = operators.moe_router
    assert router is not None
    contract = numerics.router_contract(layer.config.top_k, layer.config.renormalise)
    logits_PE = operators.linear.linear(hidden_PH, layer.router)
    weights_PT, experts_PT = router.moe_router(logits_PE, contract)
    if routes is None:
        return weights_PT, experts_PT
    routes.chosen.setdefault(index, []).append(experts_PT[: rows.count])
    if index not in routes.given:
        return weights_PT, experts_PT
    experts_PT = _replayed(routes, index, experts_PT, rows)
    return router.routed_weights(logits_PE, experts_PT, contract), experts_PT


def _replayed(routes: Routes, index: int, own_PT: torch.Tensor, rows: RankRows) -> torch.Tensor:
    """The recorded experts where there are any, the router's own elsewhere; counts both."""
    given_NT = routes.given[index]
    if given_NT.dim() != 2 or given_NT.shape[1] != own_PT.shape[1]:
        raise OperandError(
            f"routes of layer {index} are {tuple(given_NT.shape)}; pass [rows, {own_PT.shape[1]}] experts"
        )
    given_PT = given_NT.to(own_PT.device).index_select(0, rows.rows_P)
    recorded_P = (given_PT >= 0).all(1)
    agree_P = (given_PT.sort(1).values == own_PT.sort(1).values).all(1) & recorded_P
    routes.covered += int(recorded_P[: rows.count].sum())
    routes.agreeing += int(agree_P[: rows.count].sum())
    return torch.where(recorded_P[:, None], given_PT, own_PT)
