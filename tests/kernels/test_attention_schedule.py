"""Claim: attention gives a position the same bits in one prefill, in chunks, one token at a time, in any batch and
under any paging (T1 to T5 and T7 of the invariance suite)."""

from __future__ import annotations

from collections.abc import Sequence

import hypothesis.strategies as st
import pytest
import torch
from attention_model import drawn, packed
from hypothesis import given, settings

from rlk_ledger_kernels.bits import same_bits
from rlk_ledger_kernels.ops.attention import triton as on_triton
from rlk_ledger_kernels.ops.attention.cache import KVCache
from rlk_ledger_kernels.ops.attention.contract import AttentionContract
from rlk_ledger_kernels.ops.attention.plan import Chunk, plan_attention
from rlk_ledger_kernels.ops.attention.torch import attention
from rlk_ledger_kernels.schedule import Schedule, placebo_schedules

HEADS, KV, D = 4, 2, 32
SCHEDULES = [Schedule(), *placebo_schedules(4)]


def tensors(seed: int, length: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return tuple(torch.randn((length, heads, D), generator=g) for heads in (HEADS, KV, KV))


def run(
    sequences: Sequence[tuple[torch.Tensor, torch.Tensor, torch.Tensor]],
    cuts: Sequence[Sequence[int]],
    schedule: Schedule,
    pages: Sequence[Sequence[int]] | None = None,
    garbage: float = 0.0,
) -> list[torch.Tensor]:
    """Outputs of all positions; sequence i is fed in chunks that end at cuts[i], chunk by chunk side by side."""
    needed = [-(-len(q) // schedule.kv_block) for q, _, _ in sequences]
    if pages is None:
        starts = [sum(needed[:i]) for i in range(len(needed))]
        pages = [range(start, start + count) for start, count in zip(starts, needed)]
    cache = KVCache(max(max(page) for page in pages) + 1, KV, schedule.kv_block, D)
    if garbage:
        cache.keys.fill_(garbage)
        cache.values[..., :D].fill_(garbage)
    contract = AttentionContract(scale=D**-0.5, schedule=schedule)
    parts: list[list[torch.Tensor]] = [[] for _ in sequences]
    for turn in range(max(len(ends) for ends in cuts)):
        members = [i for i, ends in enumerate(cuts) if turn < len(ends)]
        spans = [(i, cuts[i][turn - 1] if turn else 0, cuts[i][turn]) for i in members]
        plan = plan_attention([Chunk(a, b - a, pages[i]) for i, a, b in spans], schedule)
        q, k, v = (torch.cat([sequences[i][which][a:b] for i, a, b in spans]) for which in range(3))
        cache.write(k, v, plan)
        out, _ = attention(q, cache, plan, contract)
        for (i, _, _), part in zip(spans, out.split([b - a for _, a, b in spans])):
            parts[i].append(part)
    return [torch.cat(part) for part in parts]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_decode_equals_prefill_bitwise(schedule: Schedule) -> None:
    sequence = tensors(0, 150)
    whole = run([sequence], [[150]], schedule)[0]
    for prompt in (1, 37, 64, 149):
        assert same_bits(run([sequence], [[prompt, *range(prompt + 1, 151)]], schedule)[0], whole)


@settings(max_examples=30, deadline=None)
@given(data=st.data(), schedule=st.sampled_from(SCHEDULES), seed=st.integers(0, 1000))
def test_any_batch_chunking_and_paging_gives_the_same_bits(data: st.DataObject, schedule: Schedule, seed: int) -> None:
    lengths = data.draw(st.lists(st.integers(1, 140), min_size=1, max_size=5))
    sequences = [tensors(seed + i, length) for i, length in enumerate(lengths)]
    alone = [run([sequence], [[len(sequence[0])]], schedule)[0] for sequence in sequences]
    cuts = [[*sorted(data.draw(st.sets(st.integers(1, max(1, n - 1)), max_size=4)) - {n}), n] for n in lengths]
    needed = [-(-n // schedule.kv_block) for n in lengths]
    shuffled = data.draw(st.permutations(range(sum(needed) + 2)))
    pages = [shuffled[sum(needed[:i]) : sum(needed[: i + 1])] for i in range(len(needed))]
    together = run(sequences, cuts, schedule, pages)
    assert all(same_bits(a, b) for a, b in zip(alone, together))


@pytest.mark.parametrize(("block", "wide"), [(16, True), (64, False)])
def test_triton_gives_the_same_bits_in_one_prefill_in_chunks_and_in_decode(block: int, wide: bool) -> None:
    contract = AttentionContract(0.3, "bfloat16", Schedule(kv_block=block), scale_at="score", weights="bfloat16")
    sequences = [drawn(i, n, 8, 2, 16, torch.bfloat16) for i, n in enumerate((75, 1, 40))]
    q, cache, plan = packed(sequences, contract, "bfloat16", wide=wide)
    out, lse = on_triton.attention(q, cache, plan, contract)
    for tile in (8, 16):
        again = plan_attention(plan.chunks, contract.schedule, tile)
        assert same_bits(on_triton.attention(q, cache, again, contract)[0], out)
    q, k, v = sequences[0]
    chunk = plan.chunks[0]
    fresh = KVCache(len(cache.keys), 2, block, 16, "bfloat16", wide=wide)
    first = 0
    for end in (50, 51, 52, 64, 65, 75):
        step = plan_attention([Chunk(first, end - first, chunk.blocks)], contract.schedule)
        fresh.write(k[first:end], v[first:end], step)
        got_out, got_lse = on_triton.attention(q[first:end], fresh, step, contract)
        assert same_bits(got_out, out[first:end])
        assert same_bits(got_lse, lse[first:end])
        first = end


def test_slots_that_were_never_written_weigh_exactly_nothing() -> None:
    sequence = tensors(3, 70)
    assert same_bits(run([sequence], [[70]], Schedule(), garbage=1e30)[0], run([sequence], [[70]], Schedule())[0])


def test_later_tokens_never_reach_earlier_ones() -> None:
    q, k, v = tensors(4, 100)
    changed = (q.clone(), k.clone(), v.clone())
    for tensor in changed:
        tensor[61:] = 1e4
    first = run([(q, k, v)], [[100]], Schedule())[0]
    assert same_bits(run([changed], [[100]], Schedule())[0][:61], first[:61])


def test_the_suite_catches_a_kv_block_chosen_by_length() -> None:
    """Wrong: the block is sized to the keys at hand, so a chunk boundary moves the partial sums."""
    sequence = tensors(5, 120)

    def adaptive(cuts: list[int]) -> torch.Tensor:
        block = 16 if len(cuts) > 1 else 128
        return run([sequence], [cuts], Schedule(kv_block=block))[0]

    assert not same_bits(adaptive([60, 120]), adaptive([120]))
