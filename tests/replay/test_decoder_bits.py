"""Claim: in one set of numerics the decoder gives a token the same bits alone, in any batch, with anything appended,
chunked anywhere, by prefill or by decode, on one thread or two; and a wrong operator breaks exactly that."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import blake3
import pytest
import torch

import rlk_ledger_replay
from rlk_ledger_kernels.bits import same_bits
from rlk_ledger_kernels.errors import ContractError, OperandError
from rlk_ledger_kernels.ops.linear.torch import PackedLinear
from rlk_ledger_kernels.schedule import placebo_schedules
from rlk_ledger_replay.decoder import Decoder
from rlk_ledger_replay.numerics import Numerics

MODEL = Path(rlk_ledger_replay.__file__).parent / "model"
TEXT = Path(textwrap.__file__).read_bytes()
NUMERICS = [
    Numerics(),
    Numerics(compute="bfloat16"),
    Numerics(compute="bfloat16", rms_norm="kernel", swiglu="product", temperature=0.7, logits="float32"),
    *(Numerics(compute=dtype, schedule=s) for s, dtype in zip(placebo_schedules(4), ("float32", "bfloat16") * 2)),
]
LABELS = [f"{n.compute}-{i}" for i, n in enumerate(NUMERICS)]


def sample(index: int) -> tuple[list[int], int]:
    """The index-th of a fixed family of samples, 2 to 150 tokens long."""
    length = 2 + (index * 7919) % 149
    begin = index * 331
    return [256, *TEXT[begin : begin + length - 1]], 1 + (index * 104729) % (length - 1)


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    return Decoder.load(MODEL)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """One thread, since two fight over the cores with whatever else runs; tests of threads ask for two."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("numerics", NUMERICS, ids=LABELS)
def test_alone_batched_and_decoded_are_the_same_bits(decoder: Decoder, numerics: Numerics) -> None:
    scorer = decoder.with_numerics(numerics)
    samples = [sample(index) for index in range(37)]
    batch = scorer.prefill_logprobs_batch(samples)
    assert [len(scores) for scores in batch] == [len(ids) - start for ids, start in samples]
    for index in range(0, 37, 5):
        assert same_bits(scorer.prefill_logprobs(*samples[index]), batch[index])
    assert all(same_bits(a, b) for a, b in zip(reversed(scorer.prefill_logprobs_batch(samples[::-1])), batch))
    short = [index for index, (ids, start) in enumerate(samples) if len(ids) - start < 40]
    decoded = scorer.decode_logprobs_batch([samples[index] for index in short])
    assert len(short) > 8
    assert all(same_bits(scores, batch[index]) for scores, index in zip(decoded, short))


@pytest.mark.parametrize("numerics", NUMERICS[:2], ids=LABELS[:2])
def test_two_threads_give_the_bits_of_one(decoder: Decoder, numerics: Numerics) -> None:
    scorer = decoder.with_numerics(numerics)
    samples = [sample(index) for index in range(5)]
    one = scorer.prefill_logprobs_batch(samples)
    torch.set_num_threads(2)
    assert all(same_bits(a, b) for a, b in zip(scorer.prefill_logprobs_batch(samples), one))


@pytest.mark.parametrize("numerics", NUMERICS[:2], ids=LABELS[:2])
def test_decode_of_one_sample_equals_its_prefill(decoder: Decoder, numerics: Numerics) -> None:
    scorer = decoder.with_numerics(numerics)
    ids = [256, *TEXT[2000:2130]]
    for start in (1, 5, 64, 100, 130):
        assert same_bits(scorer.decode_logprobs(ids, start), scorer.prefill_logprobs(ids, start))


@pytest.mark.parametrize("numerics", NUMERICS[:2], ids=LABELS[:2])
def test_a_chunk_boundary_anywhere_changes_nothing(decoder: Decoder, numerics: Numerics) -> None:
    scorer = decoder.with_numerics(numerics)
    ids = [256, *TEXT[500:600]]
    whole = scorer.prefill_logprobs(ids, 10)
    for boundary in range(1, len(ids) - 1):
        assert same_bits(scorer.chunked(ids, 10, [boundary]), whole)
    assert same_bits(scorer.chunked(ids, 10, range(1, len(ids) - 1)), whole)
    assert same_bits(scorer.chunked(ids, 10, [3, 32, 33, 64, 99]), whole)


def test_tokens_appended_on_the_right_change_nothing_before_them(decoder: Decoder) -> None:
    ids = [256, *TEXT[:90]]
    whole = decoder.prefill_logprobs(ids, 20)
    for padding in (1, 5, 40, 200):
        assert same_bits(decoder.prefill_logprobs([*ids, *[258] * padding], 20)[: len(whole)], whole)


def test_a_schedule_changes_rounding_and_nothing_else(decoder: Decoder) -> None:
    ids, start = [256, *TEXT[:250]], 10
    base = decoder.prefill_logprobs(ids, start)
    for schedule in placebo_schedules(10):
        other = decoder.with_numerics(Numerics(schedule=schedule)).prefill_logprobs(ids, start)
        assert not same_bits(other, base)
        torch.testing.assert_close(other, base, atol=3e-5, rtol=0)
    tiles = decoder.with_numerics(Numerics(schedule=replace(Numerics().schedule, row_tiles=(32,)))).prefill_logprobs(
        ids, start
    )
    assert same_bits(tiles, base)


def split_k_by_shape(x: torch.Tensor, packed: PackedLinear) -> torch.Tensor:
    """Wrong: few rows cut K in two, to keep more cores busy; many rows do not."""
    weight = torch.cat([leaf for _, _, leaf in packed.leaves])[:, : packed.outputs]
    if x.shape[0] >= 32:
        return x.float() @ weight
    half = packed.k // 2
    return x[:, :half].float() @ weight[:half] + x[:, half:].float() @ weight[half:]


def test_split_k_by_shape_in_the_decoder_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = Decoder.load(MODEL)
    monkeypatch.setitem(broken.operators.linear.__dict__["_functions"], "linear", split_k_by_shape)
    ids = [256, *TEXT[:120]]
    assert not same_bits(broken.decode_logprobs(ids, 20), broken.prefill_logprobs(ids, 20))


def test_scoring_leaves_the_weights_untouched(decoder: Decoder) -> None:
    def digest() -> str:
        hasher = blake3.blake3()
        for name, tensor in sorted(decoder.checkpoint.tensors.items()):
            hasher.update(name.encode() + tensor.contiguous().view(torch.int16).numpy().tobytes())
        return hasher.hexdigest()

    before = digest()
    for numerics in NUMERICS[:3]:
        decoder.with_numerics(numerics).decode_logprobs([256, *TEXT[:40]], 30)
    assert digest() == before


def test_raw_ignores_temperature_and_processed_applies_it(decoder: Decoder) -> None:
    ids, start = [256, *TEXT[:80]], 5
    plain = decoder.prefill_logprobs(ids, start)
    raw = decoder.with_numerics(Numerics(temperature=0.7, logprob_mode="raw")).prefill_logprobs(ids, start)
    processed = decoder.with_numerics(Numerics(temperature=0.7)).prefill_logprobs(ids, start)
    assert same_bits(raw, plain)
    assert float((processed - plain).abs().mean()) > 0.05


@pytest.mark.parametrize(
    "change",
    [
        {"compute": "bfloat16"},
        {"lm_head": "bfloat16"},
        {"logits": "bfloat16"},
        {"kv_cache": "bfloat16"},
        {"rope_table": "bfloat16"},
    ],
)
def test_each_dtype_choice_takes_effect(decoder: Decoder, change: dict[str, str]) -> None:
    ids, start = [256, *TEXT[:200]], 5
    base = decoder.prefill_logprobs(ids, start)
    distance = float((decoder.with_numerics(Numerics(**change)).prefill_logprobs(ids, start) - base).abs().mean())
    assert 1e-4 < distance < 0.1


def test_each_rounding_order_takes_effect_in_bfloat16(decoder: Decoder) -> None:
    ids, start = [256, *TEXT[:200]], 5
    base = decoder.with_numerics(Numerics(compute="bfloat16")).prefill_logprobs(ids, start)
    for change in ({"rms_norm": "kernel"}, {"swiglu": "product"}):
        other = decoder.with_numerics(Numerics(compute="bfloat16", **change)).prefill_logprobs(ids, start)
        assert not same_bits(other, base)


@pytest.mark.parametrize(
    ("token_ids", "start", "message"),
    [
        ([1, 2, 3], 0, "sample 0: start is 0 of 3 tokens; the prompt needs 1..2"),
        ([1, 2, 3], 3, "start is 3 of 3 tokens"),
        ([1], 1, "start is 1 of 1 tokens"),
        ([1, 272, 3], 1, r"token 272 at position 1 is outside 0\.\.271"),
        ([1, -1, 3], 1, r"token -1 at position 1"),
        ([1.5, 2.0], 1, "expected integers"),
        ([[1, 2], [3, 4]], 1, "expected integers"),
        ("text", 1, "is not a list of integers"),
        ([1, 2, 3], "1", "start is '1', expected the length of the prompt"),
        ([1, 2, 3], None, "start is None"),
        ([0] * 513, 1, "513 tokens exceed the model's 512 positions"),
    ],
)
def test_wrong_samples_are_refused_in_one_sentence(
    decoder: Decoder, token_ids: object, start: object, message: str
) -> None:
    for score in (decoder.prefill_logprobs, decoder.decode_logprobs):
        with pytest.raises(OperandError, match=message):
            score(token_ids, start)


def test_wrong_boundaries_and_numerics_are_refused(decoder: Decoder) -> None:
    for boundaries in ([0], [5, 5], [9], [4, 2]):
        with pytest.raises(OperandError, match="must rise within 1"):
            decoder.chunked(list(range(10)), 2, boundaries)
    with pytest.raises(ContractError, match="logprob_mode is 'cooked'"):
        Numerics(logprob_mode="cooked")
    with pytest.raises(ContractError, match="temperature is -1"):
        Numerics(temperature=-1.0, logprob_mode="raw")
    with pytest.raises(ContractError, match=r"temperature is '0.7'; choose a finite number"):
        Numerics(temperature="0.7")
    with pytest.raises(ContractError, match="schedule is 3; pass a Schedule"):
        Numerics(schedule=3)


def test_no_samples_give_no_scores(decoder: Decoder) -> None:
    assert decoder.prefill_logprobs_batch([]) == []
    assert decoder.decode_logprobs_batch([]) == []
