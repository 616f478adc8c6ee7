"""Claim: a split-KV plan covers batch x TP x CP x owner exactly once or is refused by name, in linear time, has one
canonical form, can be recorded, and changes no bit of the attention it describes."""

from __future__ import annotations

from types import ModuleType

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from attention_model import drawn, packed
from hypothesis import given, settings

from rlk_ledger_kernels.bits import same_bits
from rlk_ledger_kernels.errors import ContractError, OperandError
from rlk_ledger_kernels.ops.attention import torch as on_torch
from rlk_ledger_kernels.ops.attention import triton as on_triton
from rlk_ledger_kernels.ops.attention.contract import AttentionContract
from rlk_ledger_kernels.ops.attention.split_plan import SplitPlan, plan_splits, split_attention
from rlk_ledger_kernels.schedule import Schedule
from rlk_ledger_schemas.errors import EventError
from rlk_ledger_schemas.events import SplitkvPlanned, check_fields


def with_entries(plan: SplitPlan, entries: np.ndarray) -> SplitPlan:
    return SplitPlan(plan.kv_block, plan.blocks, plan.tp, plan.cp, plan.owners, entries, plan.num_splits)


@settings(max_examples=40, deadline=None)
@given(
    blocks=st.lists(st.integers(1, 30), min_size=1, max_size=4),
    tp=st.integers(1, 3),
    cp=st.integers(1, 3),
    splits=st.integers(1, 4),
    ownership=st.sampled_from(["contiguous", "zigzag"]),
    seed=st.integers(0, 99),
)
def test_every_block_has_one_owner_and_the_form_is_canonical(
    blocks: list[int], tp: int, cp: int, splits: int, ownership: str, seed: int
) -> None:
    plan = plan_splits(blocks, 64, 2 * splits, tp=tp, cp=cp, ownership=ownership)  # type: ignore[arg-type]
    for tp_rank in range(tp):
        for sequence, count in enumerate(blocks):
            owned = [b for cp_rank in range(cp) for b in plan.owned(tp_rank, cp_rank)[sequence]]
            assert sorted(owned) == list(range(count))
            by_owner = [b for c in range(cp) for o in range(2 * splits) for b in plan.owned(tp_rank, c, o)[sequence]]
            assert by_owner == owned
    shuffled = with_entries(plan, np.random.default_rng(seed).permutation(plan.entries_E6))
    assert shuffled.canonical() == plan.canonical()
    assert shuffled.fingerprint == plan.fingerprint


def test_what_is_missing_double_or_out_of_range_is_named() -> None:
    plan = plan_splits([5, 9], 64, 2, tp=2, cp=2)
    entries = plan.entries_E6

    def changed(row: int, column: int, value: int) -> np.ndarray:
        copy = entries.copy()
        copy[row, column] = value
        return copy

    wrong = {
        "sequence 0, TP rank 0, CP rank 0, owner 1 is missing": np.delete(entries, 1, axis=0),
        "sequence 0, TP rank 0, CP rank 0, owner 0 is given twice": np.concatenate((entries, entries[:1])),
        r"entry 3 has cp_rank 2, outside 0\.\.1": changed(3, 2, 2),
        r"entry 0 has sequence -1, outside 0\.\.1": changed(0, 0, -1),
        r"owner 1 has blocks 3\.\.6 \(end exclusive\), the sequence has 5": changed(3, 5, 6),
        r"owner 0 has blocks 1\.\.0": changed(0, 4, 1) if entries[0, 5] == 0 else changed(0, 4, entries[0, 5] + 1),
        "block 0 of sequence 0, TP rank 0, is covered by no owner": changed(0, 4, entries[0, 5]),
        "block 0 of sequence 1, TP rank 1, is covered by 2 owners": changed(15, 4, 0),
    }
    del wrong[r"owner 0 has blocks 1\.\.0"]
    for told, rows in wrong.items():
        with pytest.raises(OperandError, match=told):
            with_entries(plan, rows)
    with pytest.raises(OperandError, match="are at least 1"):
        plan_splits([0], 64, 1)
    with pytest.raises(OperandError, match="zigzag ownership needs a multiple of 2"):
        plan_splits([4], 64, 3, ownership="zigzag")


def test_a_hundred_thousand_entries_are_checked_by_index(monkeypatch: pytest.MonkeyPatch) -> None:
    """Validation calls numpy a fixed number of times, whatever the number of entries: no loop over pairs can hide."""
    calls = {"flatnonzero": 0, "bincount": 0}
    for name in calls:
        real = getattr(np, name)

        def counted(*args: object, real: object = real, name: str = name, **options: object) -> object:
            calls[name] += 1
            return real(*args, **options)  # type: ignore[operator]

        monkeypatch.setattr(np, name, counted)
    seen = []
    for sequences in (10, 12_500):
        calls.update(flatnonzero=0, bincount=0)
        plan = plan_splits([16] * sequences, 64, 4, tp=2)
        seen.append(dict(calls))
    assert len(plan.entries_E6) == 100_000
    assert seen[0] == seen[1]
    broken = plan.entries_E6.copy()
    broken[77_777, 5] -= 1
    with pytest.raises(OperandError, match="is covered by no owner"):
        with_entries(plan, broken)


def test_a_number_of_splits_that_follows_the_batch_is_refused_in_strict_use() -> None:
    with pytest.raises(ContractError, match="num_splits 'auto' lets the batch choose; give a number in strict use"):
        plan_splits([40, 3], 64, "auto")
    alone, beside = plan_splits([3], 64, "auto", strict=False), plan_splits([40, 3], 64, "auto", strict=False)
    assert alone.owners != beside.owners, "the pitfall: a longer neighbour changes how a sequence is split"
    with pytest.raises(EventError, match="a strict plan cannot have num_splits 'auto'"):
        check_fields("splitkv.planned", alone.to_event(strict=True))


def test_a_plan_is_recorded_with_its_entries() -> None:
    plan = plan_splits([5, 9], 64, 2, tp=2, cp=2, kv_order="reverse")
    event = SplitkvPlanned(**plan.to_event())
    assert event.plan_id == plan.fingerprint
    assert event.merge_order == "global_block_index_descending"
    rows = np.asarray(plan.entries_E6.reshape(-1))
    assert event.fields()["entries"].data == rows.astype("<i4").tobytes()
    with pytest.raises(EventError, match="need 16 entries of 6 integers, `entries` has 90 integers"):
        check_fields("splitkv.planned", {**plan.to_event(), "entries": rows[:-6]})


@pytest.mark.parametrize(("module", "block"), [(on_torch, 16), (on_triton, 64)])
def test_attention_by_any_plan_has_the_bits_of_attention(module: ModuleType, block: int) -> None:
    contract = AttentionContract(0.25, schedule=Schedule(kv_block=block))
    q, cache, plan = packed([drawn(i, n, 4, 2, 16, torch.float32) for i, n in enumerate((130, 20))], contract)
    out, lse = module.attention(q, cache, plan, contract)
    blocks = [len(chunk.blocks) for chunk in plan.chunks]
    for splits in (
        plan_splits(blocks, block, 3),
        plan_splits(blocks, block, 2, cp=2, ownership="zigzag"),
    ):
        got_out, got_lse = split_attention(module, q, cache, plan, contract, splits)
        assert same_bits(got_out, out)
        assert same_bits(got_lse, lse)
    with pytest.raises(OperandError, match="the split-KV plan has blocks of 64 and"):
        split_attention(module, q, cache, plan, contract, plan_splits([1, 1], 64, 1))
    with pytest.raises(OperandError, match="merges by global_block_index_descending"):
        split_attention(module, q, cache, plan, contract, plan_splits(blocks, block, 1, kv_order="reverse"))
