"""Claim: a sliding window shows query i the keys i - window < j <= i and nothing else, in every backend; blocks outside
it are not visited, which changes no bit; what a row does not see never reaches it, whatever it holds."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from attention_model import drawn, packed, plain
from transformers.masking_utils import sliding_window_overlay

from rlk_ledger_kernels.bits import same_bits
from rlk_ledger_kernels.errors import ContractError, OperandError
from rlk_ledger_kernels.ops.attention import reference
from rlk_ledger_kernels.ops.attention import torch as on_torch
from rlk_ledger_kernels.ops.attention import triton as on_triton
from rlk_ledger_kernels.ops.attention.contract import AttentionContract
from rlk_ledger_kernels.ops.attention.plan import Chunk, plan_attention
from rlk_ledger_kernels.schedule import Schedule

MODULES = [on_torch, on_triton, reference]
BLOCKWISE = [on_torch, on_triton]


def name(module: ModuleType) -> str:
    return module.__name__.rsplit(".", 1)[-1]


@pytest.mark.parametrize("module", MODULES, ids=name)
@pytest.mark.parametrize(
    ("heads", "block", "window", "order"),
    [
        ((4, 2, 16), 64, 40, "forward"),
        ((1, 1, 2), 64, 1, "forward"),
        ((6, 2, 6), 16, 33, "reverse"),
        ((8, 1, 34), 64, 500, "forward"),
    ],
)
def test_the_window_is_the_definition(
    module: ModuleType, heads: tuple[int, int, int], block: int, window: int, order: str
) -> None:
    contract = AttentionContract(0.3, schedule=Schedule(kv_block=block, kv_order=order), window=window)  # type: ignore[arg-type]
    sequences = [drawn(i, n, *heads, torch.float32) for i, n in enumerate((130, 1, 33))]
    q, cache, plan = packed(sequences, contract)
    out, lse = module.attention(q, cache, plan, contract)
    expected = [plain(*sequence, 0.3, window) for sequence in sequences]
    torch.testing.assert_close(out.double(), torch.cat([o for o, _ in expected]), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(lse.double(), torch.cat([x for _, x in expected]), atol=1e-5, rtol=1e-5)


def test_the_window_is_that_of_transformers() -> None:
    shown = sliding_window_overlay(5)
    seen = [[bool(shown(0, 0, i, j)) and j <= i for j in range(12)] for i in range(12)]
    assert seen == [[i - 5 < j <= i for j in range(12)] for i in range(12)]


@pytest.mark.parametrize("module", BLOCKWISE, ids=name)
def test_a_window_decodes_to_the_bits_of_its_prefill(module: ModuleType) -> None:
    contract = AttentionContract(0.3, schedule=Schedule(kv_block=16), window=21)
    sequence = drawn(0, 75, 4, 1, 16, torch.float32)
    q, cache, plan = packed([sequence], contract)
    out, lse = module.attention(q, cache, plan, contract)
    for cuts in ((50, *range(51, 76)), (1, 16, 33, 75)):
        _, fresh, whole = packed([sequence], contract, stale=float("nan"))
        fresh.keys.fill_(float("nan"))
        fresh.values[..., : fresh.head_dim].fill_(float("nan"))
        first = 0
        for end in cuts:
            step = plan_attention(
                [Chunk(first, end - first, whole.chunks[0].blocks)], contract.schedule, window=contract.window
            )
            fresh.write(sequence[1][first:end], sequence[2][first:end], step)
            got_out, got_lse = module.attention(q[first:end], fresh, step, contract)
            assert same_bits(got_out, out[first:end])
            assert same_bits(got_lse, lse[first:end])
            first = end


def test_blocks_outside_the_window_are_not_visited_and_visiting_them_masked_changes_no_bit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    contract = AttentionContract(0.3, schedule=Schedule(kv_block=16), window=10)
    sequence = drawn(1, 150, 2, 2, 8, torch.float32)
    sequence[2][:] = -sequence[2].abs() * 1e-30  # negative values that underflow: a zero's sign would show a visit
    q, cache, plan = packed([sequence], contract)
    out, lse = on_torch.attention(q, cache, plan, contract)
    assert max(step.end - step.begin for step in plan.steps) == 2
    monkeypatch.setattr("rlk_ledger_kernels.ops.attention.plan.first_block", lambda start_T, block, window: start_T * 0)
    _, cache, everything = packed([sequence], contract)
    assert max(step.end - step.begin for step in everything.steps) == everything.tiles
    got_out, got_lse = on_torch.attention(q, cache, everything, contract)
    assert same_bits(got_out, out)
    assert same_bits(got_lse, lse)


@pytest.mark.parametrize("module", BLOCKWISE, ids=name)
@pytest.mark.parametrize("stale", [float("nan"), float("inf"), -1e30])
def test_what_pages_held_before_never_reaches_a_row(module: ModuleType, stale: float) -> None:
    for window in (None, 20):
        contract = AttentionContract(0.3, schedule=Schedule(kv_block=64), window=window)
        sequences = [drawn(i, n, 4, 2, 16, torch.float32) for i, n in enumerate((70, 1))]
        q, cache, plan = packed(sequences, contract)
        clean = module.attention(q, cache, plan, contract)
        q, cache, plan = packed(sequences, contract, stale=stale)
        if stale == float("inf"):
            cache.keys.nan_to_num_(posinf=3.0)  # numpy, under the interpreter, warns of infinite products
        assert all(same_bits(a, b) for a, b in zip(module.attention(q, cache, plan, contract), clean))


@pytest.mark.parametrize("module", BLOCKWISE, ids=name)
def test_values_that_are_not_finite_reach_only_the_rows_that_see_them(module: ModuleType) -> None:
    contract = AttentionContract(0.3, schedule=Schedule(kv_block=16), window=20)
    q, k, v = drawn(3, 60, 2, 1, 8, torch.float32)
    rows, cache, plan = packed([(q, k, v)], contract)
    clean, clean_lse = module.attention(rows, cache, plan, contract)
    v = v.clone()
    v[30], v[31, 0, 0] = float("nan"), float("inf")
    rows, cache, plan = packed([(q, k, v)], contract)
    out, lse = module.attention(rows, cache, plan, contract)
    blind = [i for i in range(60) if not 30 <= i < 51]
    assert same_bits(out[blind], clean[blind])
    assert same_bits(lse, clean_lse)
    assert bool(out[30:50].isnan().all())


@pytest.mark.filterwarnings("ignore:invalid value")  # of numpy, under the interpreter
@pytest.mark.parametrize("module", BLOCKWISE, ids=name)
def test_values_that_are_not_finite_give_one_row_the_same_bits_however_its_queries_arrive(module: ModuleType) -> None:
    contract = AttentionContract(1.0, schedule=Schedule(kv_block=16))
    q, k, v = drawn(5, 50, 2, 1, 16, torch.float32)
    k[2] = -k[2].abs() * 40
    q = q.abs() * 4  # key 2 weighs so little that its weight is 0
    v[2, 0, 0], v[3, 0, 1], v[5, 0, 2], v[6, 0, 2] = (float(x) for x in ("inf", "-inf", "inf", "-inf"))
    rows, cache, plan = packed([(q, k, v)], contract)
    out, lse = module.attention(rows, cache, plan, contract)
    assert bool(out[7:, :, :3].isnan().all())
    assert bool(out[:, :, 3:].isfinite().all())
    for at in (15, 49):
        step = plan_attention([Chunk(at, 1, plan.chunks[0].blocks)], contract.schedule)
        got_out, got_lse = module.attention(rows[at : at + 1], cache, step, contract)
        assert same_bits(got_out, out[at : at + 1])
        assert same_bits(got_lse, lse[at : at + 1])
    parts = [module.attention_partials(rows, cache, plan, contract, [own]) for own in ([0, 2], [1, 3])]
    merged_out, merged_lse = module.merge_partials(parts, plan, contract)
    assert same_bits(merged_out, out)
    assert same_bits(merged_lse, lse)


def test_scores_at_the_ends_of_the_range_stay_what_softmax_makes_of_them() -> None:
    contract = AttentionContract(1.0, schedule=Schedule(kv_block=16))
    q, k, v = drawn(4, 40, 2, 2, 8, torch.float32)
    for scale in (1e-30, 1e4, 1e12):
        rows, cache, plan = packed([(q * scale, k, v)], contract)
        expected, _ = plain(q * scale, k, v, 1.0, None)
        for module in (on_torch, on_triton):
            out, lse = module.attention(rows, cache, plan, contract)
            torch.testing.assert_close(out.double(), expected, atol=1e-4, rtol=1e-4)
            assert bool(lse.isfinite().all())
    zeros = torch.full_like(v, -0.0)
    rows, cache, plan = packed([(q, k, zeros)], contract)
    for module in (on_torch, on_triton):
        out, _ = module.attention(rows, cache, plan, contract)
        assert same_bits(out, torch.zeros_like(out)), "a sum of negative zeros is +0, however many blocks it crossed"


def test_the_plan_holds_no_more_than_the_visits() -> None:
    """One long sequence beside many short ones costs its own visits, not the product of both."""
    schedule = Schedule(kv_block=16)
    long, short = Chunk(0, 3200, range(200)), Chunk(0, 16, [0])
    steps = plan_attention([long] + [short] * 500, schedule).steps
    assert sum(len(step.blocks_A) for step in steps) == 200 * 201 // 2 + 500
    windowed = plan_attention([long] + [short] * 500, schedule, window=16).steps
    assert sum(len(step.blocks_A) for step in windowed) == 2 * 200 - 1 + 500


def test_an_empty_window_and_plans_that_disagree_are_refused() -> None:
    with pytest.raises(ContractError, match=r"attention\.window is 0; choose at least 1"):
        AttentionContract(1.0, window=0)
    with pytest.raises(OperandError, match="the window is 0"):
        plan_attention([Chunk(0, 1, [0])], Schedule(), window=0)
    with pytest.raises(ContractError, match=r"attention.scale_at is 'key'"):
        AttentionContract(1.0, scale_at="key")  # type: ignore[arg-type]
    q, cache, plan = packed([drawn(0, 5, 2, 2, 8, torch.float32)], AttentionContract(1.0))
    for module in MODULES:
        with pytest.raises(OperandError, match="the contract's window is 4, the plan's None"):
            module.attention(q, cache, plan, AttentionContract(1.0, window=4))
        with pytest.raises(OperandError, match="the schedule's kv_block is 16, the cache's 64"):
            module.attention(q, cache, plan, AttentionContract(1.0, schedule=Schedule(kv_block=16)))
        with pytest.raises(OperandError, match=r"q is \(5, 3, 8\); the plan has 5 rows, the cache 2 heads of 8"):
            module.attention(torch.zeros(5, 3, 8), cache, plan, AttentionContract(1.0))
        with pytest.raises(OperandError, match="q is on meta, the cache on cpu"):
            module.attention(q.to("meta"), cache, plan, AttentionContract(1.0))
