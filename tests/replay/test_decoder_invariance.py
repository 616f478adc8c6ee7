"""Claim: a token has one log-probability, bit for bit, however it reaches the decoder: alone, in a batch of 37, padded
on either side, packed, chunked at every boundary, decoded token by token, under every layout, on one thread or two; the
whole suite T1 to T7 finds nothing in the decoder and does find a wrong one."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from rlk_ledger_kernels.bits import same_bits
from rlk_ledger_kernels.errors import OperandError
from rlk_ledger_kernels.probe import using_threads
from rlk_ledger_kernels.schedule import Schedule
from rlk_ledger_kernels.suite.case import Feeding
from rlk_ledger_kernels.suite.invariance import check
from rlk_ledger_replay.decoder import Decoder
from rlk_ledger_replay.layout import Layout
from rlk_ledger_replay.numerics import Numerics
from rlk_ledger_replay.positions import decoder_case, score_positions

SIZES = {
    "vocab_size": 160,
    "hidden_size": 48,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "use_sliding_window": True,
    "sliding_window": 21,
    "max_window_layers": 1,
}
SCHEDULE = Schedule(k_leaf=31, kv_block=16, vocab_tile=16)
START = 37
ONE_RANK = Layout()


def tokens(count: int, seed: int) -> list[int]:
    return torch.randint(0, 160, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


IDS = tokens(53, 0)
BATCH = [(tokens(2 + 11 * i % 83, i), 1 + i % (1 + 11 * i % 83)) for i in range(1, 37)]


@cache
def model() -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    made = Qwen3ForCausalLM(Qwen3Config(**SIZES))
    return made.config.to_dict() | {"architectures": ["Qwen3ForCausalLM"]}, made.state_dict()


@cache
def decoder(compute: Any, layout: Layout = ONE_RANK) -> Decoder:
    return Decoder.from_tensors(*model(), Numerics(compute=compute, schedule=SCHEDULE), layout=layout)


@cache
def expected(compute: str) -> torch.Tensor:
    with using_threads(1):
        return decoder(compute).prefill_logprobs(IDS, START)


def padded(scorer: Decoder, left: int, right: int) -> torch.Tensor:
    """Scored in the middle of a rectangle whose other places hold ids that must not be read."""
    width = left + len(IDS) + right
    ids_BT, mask_BT = torch.full((3, width), -7), torch.zeros((3, width), dtype=torch.int64)
    for row, begin in enumerate((0, left, width - len(IDS))):
        ids_BT[row, begin : begin + len(IDS)], mask_BT[row, begin : begin + len(IDS)] = torch.tensor(IDS), 1
    scores_BT = scorer.prefill_padded(ids_BT, mask_BT, [START] * 3)
    assert int(scores_BT.isnan().sum()) == 3 * (width - len(IDS) + START)
    first, last = (scores_BT[row][~scores_BT[row].isnan()] for row in (0, 2))
    assert same_bits(first, last)
    return scores_BT[1, left + START : left + len(IDS)]


def two_threads(scorer: Decoder) -> torch.Tensor:
    with using_threads(2):
        return scorer.prefill_logprobs_batch([*BATCH[:5], (IDS, START)])[-1]


def every_boundary(scorer: Decoder) -> torch.Tensor:
    found = [scorer.chunked(IDS, START, [boundary]) for boundary in range(1, len(IDS) - 1)]
    assert all(same_bits(one, found[0]) for one in found)
    return scorer.chunked(IDS, START, range(1, len(IDS) - 1))


WAYS: dict[str, Callable[[Decoder], torch.Tensor]] = {
    "alone": lambda d: d.prefill_logprobs(IDS, START),
    "batch-of-37": lambda d: d.prefill_logprobs_batch([*BATCH[:20], (IDS, START), *BATCH[20:]])[20],
    "packed-in-reverse": lambda d: d.prefill_logprobs_batch([*BATCH[:20], (IDS, START), *BATCH[20:]][::-1])[16],
    "left-padded": lambda d: padded(d, 13, 0),
    "right-padded": lambda d: padded(d, 0, 17),
    "padded-on-both-sides": lambda d: padded(d, 5, 3),
    "more-tokens-on-the-right": lambda d: d.prefill_logprobs([*IDS, *tokens(40, 9)], START)[: len(IDS) - START],
    "chunked-at-every-boundary": every_boundary,
    "decoded": lambda d: d.decode_logprobs(IDS, START),
    "decoded-beside-36-others": lambda d: d.decode_logprobs_batch([*BATCH, (IDS, START)])[-1],
    "two-threads": two_threads,
}
LAYOUTS = [
    *(Layout(tp=tp) for tp in (1, 2, 4, 8)),
    *(Layout(tp=tp, sp=True) for tp in (2, 8)),
    *(Layout(cp=cp, cp_order=order) for cp in (2, 4) for order in ("contiguous", "zigzag")),
    Layout(tp=2, cp=2, sp=True, cp_order="zigzag"),
]


@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
@pytest.mark.parametrize("way", WAYS)
def test_a_token_has_one_value(way: str, compute: str) -> None:
    with using_threads(1):
        assert same_bits(WAYS[way](decoder(compute)), expected(compute))


@pytest.mark.parametrize("layout", LAYOUTS, ids=[f"tp{o.tp}-cp{o.cp}-{o.sp}-{o.cp_order}" for o in LAYOUTS])
def test_a_token_has_one_value_under_every_layout(layout: Layout) -> None:
    with using_threads(1):
        scorer = decoder("bfloat16", layout)
        for way in ("batch-of-37", "left-padded", "decoded"):
            assert same_bits(WAYS[way](scorer), expected("bfloat16")), way


@pytest.mark.parametrize(
    ("compute", "layout"), [("float32", ONE_RANK), ("bfloat16", Layout(tp=2, sp=True))], ids=["one-rank", "tp-sp"]
)
def test_the_suite_finds_nothing_in_the_decoder(compute: str, layout: Layout) -> None:
    sequences = [torch.tensor(tokens(count, count)) for count in (1, 37, 131, 16)]
    with using_threads(1):
        case = decoder_case(decoder(compute, layout), "two layers, a window of 21", sequences)
        assert check(case, ModuleType("none")) is None


def test_the_suite_finds_a_decoder_that_looks_at_the_number_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = Decoder.from_tensors(*model(), Numerics(schedule=SCHEDULE))
    functions = vars(broken.operators.linear)["_functions"]
    right = functions["linear"]

    def one_product_for_few_rows(x_NK: torch.Tensor, packed: Any) -> torch.Tensor:
        if x_NK.shape[0] > 16:
            return right(x_NK, packed)
        weight_KO = torch.cat([leaf for _, _, leaf in packed.leaves])[:, : packed.outputs]
        return x_NK.double().matmul(weight_KO.double()).float()

    monkeypatch.setitem(functions, "linear", one_product_for_few_rows)
    sequences = [torch.tensor(tokens(count, count)) for count in (1, 37, 131)]
    with using_threads(1):
        found = check(decoder_case(broken, "few rows", sequences), ModuleType("none"))
    assert found is not None
    assert found.operator == "decoder"


def test_bad_padding_and_a_shared_prefix_over_ranks_are_refused() -> None:
    ids_BT, scorer = torch.tensor([IDS]), decoder("float32")
    holes_BT = torch.ones_like(ids_BT)
    holes_BT[0, 4] = 0
    for mask_BT, starts, message in (
        (holes_BT, [START], "row 0: the mask marks 52 tokens that are not one run"),
        (torch.zeros_like(ids_BT), [START], "the mask marks 0 tokens"),
        (torch.ones_like(ids_BT)[:, 1:], [START], "pass \\[batch, length\\] twice"),
        (torch.ones_like(ids_BT), [], "and 0 starts were given"),
    ):
        with pytest.raises(OperandError, match=message):
            scorer.prefill_padded(ids_BT, mask_BT, starts)
    shared = Feeding(cuts=((32,), (40,)), shared=(1, 16))
    with pytest.raises(OperandError, match="use a layout with cp 1"):
        score_positions(decoder("bfloat16", Layout(cp=2)), [(ids_BT[0],), (ids_BT[0],)], shared)
