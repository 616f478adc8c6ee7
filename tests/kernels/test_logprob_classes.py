"""Claim: log-probabilities keep their class (finite, -inf, NaN), merge to the same bits at any rank count, and near V =
151,936 stay within 1e-5 of float64; wrong cuts are refused by name."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

import pytest
import torch

from rlk_ledger_kernels.bits import same_bits
from rlk_ledger_kernels.errors import ContractError, OperandError
from rlk_ledger_kernels.ops.linear_logprob import torch as fused
from rlk_ledger_kernels.ops.selected_logprob import torch as plain
from rlk_ledger_kernels.ops.selected_logprob.contract import LogprobContract
from rlk_ledger_kernels.ops.vocab_parallel_logprob import torch as sharded
from rlk_ledger_kernels.ops.vocab_parallel_logprob.cases import shards
from rlk_ledger_kernels.schedule import Schedule

INF, NAN = float("inf"), float("nan")
BACKENDS = ("reference", "torch", "triton")
warns_in_numpy = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter computes with numpy


def module(operator: str, backend: str) -> ModuleType:
    return import_module(f"rlk_ledger_kernels.ops.{operator}.{backend}")


@warns_in_numpy
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_class_of_a_row_is_that_of_float64(backend: str) -> None:
    logits = torch.randn((9, 70), generator=torch.Generator().manual_seed(0))
    logits[0, 5] = -INF  # the chosen token is masked
    logits[1, 6:] = -INF  # a whole tile is masked
    logits[2] = -INF
    logits[3, 40] = INF
    logits[4, 5] = INF  # chosen
    logits[5, 69] = NAN
    logits[6, :] = 0.0
    logits[6, ::2] = -0.0
    logits[7, :] = -INF
    logits[7, 5] = 3.0  # the only token there is
    tokens = torch.full((9,), 5)
    contract = LogprobContract(temperature=0.5, schedule=Schedule(vocab_tile=16))
    got = module("selected_logprob", backend).selected_logprob(logits, tokens, contract)
    expected = torch.log_softmax(logits.double() / 0.5, -1)[:, 5]
    torch.testing.assert_close(got.double(), expected, atol=1e-5, rtol=0, equal_nan=True)
    assert [got[0].item(), got[7].item()] == [-INF, 0.0]
    assert got[2:6].isnan().all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_rows_and_one_token(backend: str) -> None:
    run = module("selected_logprob", backend).selected_logprob
    assert run(torch.zeros((0, 7)), torch.zeros(0, dtype=torch.int64), LogprobContract()).shape == (0,)
    assert run(torch.tensor([[4.0]]), torch.tensor([0]), LogprobContract()).tolist() == [0.0]


@pytest.mark.parametrize("tile", [1024, 1187])
def test_a_vocabulary_of_151936_stays_within_1e_5_of_float64(tile: int) -> None:
    generator = torch.Generator().manual_seed(1)
    logits = (torch.randn((16, 151_936), generator=generator) * 10).clamp(-30, 30)
    tokens = torch.randint(0, 151_936, (16,), generator=generator)
    expected = torch.log_softmax(logits.double(), -1).gather(1, tokens[:, None])[:, 0]
    got = plain.selected_logprob(logits, tokens, LogprobContract(schedule=Schedule(vocab_tile=tile)))
    assert (got.double() - expected).abs().max() < 6e-6
    if tile == 1187:  # divides the shards of 1, 2, 4 and 8 ranks
        contract = LogprobContract(schedule=Schedule(vocab_tile=tile))
        for ranks in (2, 4, 8):
            width = 151_936 // ranks
            cuts = [(rank * width, (rank + 1) * width) for rank in range(ranks)]
            parts = [sharded.shard_statistics(logits[:, a:b], a, 151_936, tokens, contract) for a, b in cuts]
            assert same_bits(sharded.merge_statistics(parts, contract), got)


@pytest.mark.parametrize("order", ["forward", "reverse"])
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_any_number_of_ranks_gives_the_bits_of_one(backend: str, order: str) -> None:
    generator = torch.Generator().manual_seed(2)
    hidden, weight = torch.randn((17, 24), generator=generator), torch.randn((128, 24), generator=generator)
    tokens, grad = torch.randint(0, 125, (17,), generator=generator), torch.randn(17, generator=generator)
    tokens[3] = -100
    schedule = Schedule(vocab_tile=16, vocab_order=order)  # type: ignore[arg-type]
    contract = LogprobContract(temperature=1.3, ignore_index=-100, schedule=schedule)
    logits = hidden @ weight.T
    whole = module("selected_logprob", backend).selected_logprob(logits, tokens, contract, 125)
    one, head = module("linear_logprob", backend), module("vocab_parallel_logprob", backend)
    packed = one.pack_head(weight, contract, vocabulary=125)
    scored, gradients = one.linear_logprob(hidden, packed, tokens), None
    for ranks in (1, 2, 4, 8) if backend == "torch" else (1, 4):
        cuts = shards(125, 128, 16, ranks)
        parts = [head.shard_statistics(logits[:, a:b], a, 125, tokens, contract) for a, b in cuts]
        assert same_bits(head.merge_statistics(parts[::-1], contract), whole)
        heads = [one.pack_head(weight[a:b], contract, a, 125) for a, b in cuts]
        parts = [one.head_statistics(hidden, held, tokens) for held in heads]
        assert same_bits(one.merge_statistics(parts, contract), scored)
        normal, carry, rows = one.normaliser(parts, contract), None, []
        for held in heads:
            carry, made = one.head_backward(grad, hidden, held, tokens, normal, carry)
            rows.append(made)
        assert carry is not None
        found = (carry, torch.cat(rows))
        gradients = gradients or found
        assert all(same_bits(a, b) for a, b in zip(found, gradients, strict=True))


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_calls_of_other_sizes_change_no_bit_of_a_hidden_gradient(backend: str) -> None:
    generator = torch.Generator().manual_seed(3)
    hidden, weight = torch.randn((40, 24), generator=generator), torch.randn((50, 24), generator=generator)
    tokens, grad = torch.randint(0, 50, (40,), generator=generator), torch.randn(40, generator=generator)
    one = module("linear_logprob", backend)
    head = one.pack_head(weight, LogprobContract(schedule=Schedule(vocab_tile=16)))
    whole = one.linear_logprob_backward(grad, hidden, head, tokens)[0]
    for cut in (1, 13, 39):
        parts = [
            one.linear_logprob_backward(grad[rows], hidden[rows], head, tokens[rows])[0]
            for rows in (slice(0, cut), slice(cut, 40))
        ]
        assert same_bits(torch.cat(parts), whole)


def part(first: int, width: int, vocabulary: int = 64) -> object:
    contract = LogprobContract(schedule=Schedule(vocab_tile=16))
    return sharded.shard_statistics(
        torch.zeros(2, width), first, vocabulary, torch.zeros(2, dtype=torch.int64), contract
    )


def test_wrong_cuts_and_sizes_are_refused_by_name() -> None:
    contract = LogprobContract(schedule=Schedule(vocab_tile=16))
    for first, width in ((8, 24), (0, 24)):
        with pytest.raises(OperandError, match="cuts a vocabulary tile of 16; cut shards at multiples of 16"):
            part(first, width)
    with pytest.raises(OperandError, match=r"a gap between the shards at tokens 16\.\.31"):
        sharded.merge_statistics([part(0, 16), part(32, 32)], contract)  # type: ignore[list-item]
    with pytest.raises(OperandError, match=r"an overlap between the shards at tokens 16\.\.31"):
        sharded.merge_statistics([part(0, 32), part(16, 48)], contract)  # type: ignore[list-item]
    with pytest.raises(OperandError, match=r"a gap between the shards at tokens 32\.\.63"):
        sharded.merge_statistics([part(0, 32)], contract)  # type: ignore[list-item]
    with pytest.raises(OperandError, match="part 1 has 2 rows of a vocabulary of 80"):
        sharded.merge_statistics([part(0, 32), part(32, 48, 80)], contract)  # type: ignore[list-item]
    with pytest.raises(OperandError, match="no parts"):
        sharded.merge_statistics([], contract)
    with pytest.raises(OperandError, match=r"token id 64 at row 1 is outside 0\.\.63"):
        sharded.shard_statistics(torch.zeros(2, 32), 0, 64, torch.tensor([0, 64]), contract)
    with pytest.raises(OperandError, match=r"tokens are torch\.float32"):
        plain.selected_logprob(torch.zeros(2, 4), torch.zeros(2), contract)
    with pytest.raises(OperandError, match=r"a gap between the shards at tokens 16\.\.31"):
        fused.linear_logprob(torch.zeros(1, 4), fused.pack_head(torch.ones(16, 4), contract, 0, 32), torch.tensor([0]))
    with pytest.raises(ContractError, match="ignore_index is 3; choose a negative id"):
        LogprobContract(ignore_index=3)
