"""Claim: attention over 1, 2 or 4 context-parallel ranks gives the bits of one rank, output and log-sum-exp, in one
process and over gloo; what is missing, doubled or foreign among the partial results is refused by name."""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from attention_model import drawn, packed, plain
from attention_rank import CONTRACT, HEADS, LENGTHS

from rlk_ledger_kernels.bits import same_bits
from rlk_ledger_kernels.errors import OperandError
from rlk_ledger_kernels.ops.attention import partials, reference
from rlk_ledger_kernels.ops.attention import torch as on_torch
from rlk_ledger_kernels.ops.attention import triton as on_triton
from rlk_ledger_kernels.ops.attention.cache import KVCache
from rlk_ledger_kernels.ops.attention.contract import AttentionContract
from rlk_ledger_kernels.ops.attention.plan import AttentionPlan
from rlk_ledger_kernels.schedule import Schedule


def sharded(
    module: ModuleType, ranks: int, ownership: str, contract: AttentionContract
) -> tuple[tuple[torch.Tensor, torch.Tensor], list[partials.BlockPartials], AttentionPlan]:
    """The undivided result, and the partials of ranks that hold nothing but the keys of their own blocks."""
    sequences = [drawn(i, n, *HEADS, torch.float32) for i, n in enumerate(LENGTHS)]
    q, cache, plan = packed(sequences, contract)
    _, k, v = (torch.cat(parts) for parts in zip(*sequences))
    parts = []
    for rank in range(ranks):
        owned = [getattr(partials, ownership)(len(chunk.blocks), ranks)[rank] for chunk in plan.chunks]
        own = KVCache(len(cache.keys), 2, plan.kv_block, 16)
        own.keys.fill_(float("nan"))
        rows = torch.from_numpy(partials.owned_rows(plan, owned))
        own.write(k[rows], v[rows], plan, rows)
        parts.append(module.attention_partials(q, own, plan, contract, owned))
    return module.attention(q, cache, plan, contract), parts, plan


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("ownership", ["contiguous", "zigzag"])
@pytest.mark.parametrize("order", ["forward", "reverse"])
@pytest.mark.parametrize("window", [None, 1, 37])
def test_any_number_of_ranks_gives_the_bits_of_one(ranks: int, ownership: str, order: str, window: int | None) -> None:
    contract = AttentionContract(0.25, schedule=Schedule(kv_block=16, kv_order=order), window=window)  # type: ignore[arg-type]
    (out, lse), parts, plan = sharded(on_torch, ranks, ownership, contract)
    for arrived in (parts, parts[::-1]):
        merged_out, merged_lse = on_torch.merge_partials(arrived, plan, contract)
        assert same_bits(merged_out, out)
        assert same_bits(merged_lse, lse)


@pytest.mark.parametrize(("ranks", "ownership"), [(2, "zigzag"), (4, "contiguous")])
def test_triton_ranks_give_the_bits_of_one(ranks: int, ownership: str) -> None:
    contract = AttentionContract(0.25, schedule=Schedule(kv_block=64), window=70)
    (out, lse), parts, plan = sharded(on_triton, ranks, ownership, contract)
    merged_out, merged_lse = on_triton.merge_partials(parts, plan, contract)
    assert same_bits(merged_out, out)
    assert same_bits(merged_lse, lse)


def test_the_reference_merges_to_its_own_value() -> None:
    contract = AttentionContract(0.25, schedule=Schedule(kv_block=64))
    (out, lse), parts, plan = sharded(reference, 2, "zigzag", contract)
    merged_out, merged_lse = reference.merge_partials(parts, plan, contract)
    torch.testing.assert_close(merged_out, out, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(merged_lse, lse, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_over_gloo_give_the_bits_of_one(ranks: int, four_ranks: list[dict[tuple[str, int], Any]]) -> None:
    q, cache, plan = packed([drawn(i, n, *HEADS, torch.float32) for i, n in enumerate(LENGTHS)], CONTRACT)
    out, lse = on_torch.attention(q, cache, plan, CONTRACT)
    for found in four_ranks[:ranks]:
        got_out, got_lse = found["attention", ranks]
        assert same_bits(got_out, out)
        assert same_bits(got_lse, lse)


def test_a_mean_of_rank_results_is_caught() -> None:
    """Wrong: each rank normalises its own part, and the ranks are averaged by their log-sum-exp or plainly."""
    contract = AttentionContract(0.25, schedule=Schedule(kv_block=16))
    (out, lse), parts, plan = sharded(on_torch, 2, "contiguous", contract)
    empty = replace(parts[0], m_EKM=torch.full_like(parts[0].m_EKM, float("-inf")))
    nothing = replace(empty, l_EKM=torch.zeros_like(empty.l_EKM), o_EKMD=torch.zeros_like(empty.o_EKMD))
    alone = on_torch.merge_partials([nothing, parts[1]], plan, contract)
    mean_of_lse = (alone[1] + lse) / 2
    assert not same_bits(mean_of_lse, lse)
    expected, _ = plain(*drawn(0, 150, 4, 2, 16, torch.float32), 0.25, None)
    torch.testing.assert_close(out[:150].double(), expected, atol=1e-5, rtol=1e-5)
    assert (alone[0][:150].double() - expected).abs().max() > 0.1


def test_a_row_whose_blocks_are_all_empty_is_zero_and_never_nan() -> None:
    contract = AttentionContract(0.25, schedule=Schedule(kv_block=16))
    _, (part,), plan = sharded(on_torch, 1, "contiguous", contract)
    gone = replace(
        part,
        m_EKM=torch.full_like(part.m_EKM, float("-inf")),
        l_EKM=torch.zeros_like(part.l_EKM),
        o_EKMD=torch.zeros_like(part.o_EKMD),
    )
    for module in (on_torch, on_triton, reference):
        out, lse = module.merge_partials([gone], plan, contract)
        assert same_bits(out, torch.zeros_like(out))
        assert bool((lse == float("-inf")).all())


def test_what_does_not_cover_the_plan_once_is_refused_by_name() -> None:
    contract = AttentionContract(0.25, schedule=Schedule(kv_block=16))
    _, parts, plan = sharded(on_torch, 2, "contiguous", contract)
    with pytest.raises(OperandError, match=r"logical block \d+ for chunk \d, positions from \d+, is given by no rank"):
        on_torch.merge_partials(parts[:1], plan, contract)
    with pytest.raises(OperandError, match="is given by two ranks"):
        on_torch.merge_partials([*parts, parts[0]], plan, contract)
    foreign = replace(parts[1], block_E=np.where(np.arange(len(parts[1].block_E)) == 0, 99, parts[1].block_E))
    with pytest.raises(OperandError, match=r"logical block \d+ for chunk \d, .* is given by no rank"):
        on_torch.merge_partials([parts[0], foreign], plan, contract)
    with pytest.raises(OperandError, match="chunk 1 has 1 logical blocks; block 1 cannot be owned"):
        partials.visits(plan, [[0], [1], [0]])
    with pytest.raises(OperandError, match="given for 1 chunks, the plan has 3"):
        partials.visits(plan, [[0]])
    with pytest.raises(OperandError, match="packed row 1 is not held by exactly one rank"):
        partials.restored_order([np.array([0, 2]), np.array([2, 3])])
