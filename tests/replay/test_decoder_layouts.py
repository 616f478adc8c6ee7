"""Claim: however ranks share the decoder (tensor, sequence or context parallel, simulated here or in real processes
over gloo), every token keeps its bits; what a model must offer for that is checked and refused by name."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from rlk_ledger.build import event
from rlk_ledger_kernels.bits import same_bits
from rlk_ledger_kernels.errors import ContractError
from rlk_ledger_kernels.parallel.group import Order
from rlk_ledger_kernels.parallel.mesh import Mesh, simulated_mesh
from rlk_ledger_kernels.schedule import Schedule
from rlk_ledger_replay.decoder import Decoder
from rlk_ledger_replay.layout import Layout
from rlk_ledger_replay.numerics import Numerics

RANK = Path(__file__).parents[1] / "support" / "decoder_rank.py"
SIZES = {
    "vocab_size": 200,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
}
EXPERTS = {"moe_intermediate_size": 64, "num_experts": 6, "num_experts_per_tok": 2, "decoder_sparse_step": 2}
SCHEDULE = Schedule(k_leaf=31, kv_block=16, vocab_tile=16)
BACKWARDS = Schedule(
    k_leaf=31, kv_block=16, vocab_tile=24, k_order="descending", kv_order="reverse", vocab_order="reverse"
)
LAYOUTS = [
    Layout(tp=2),
    Layout(tp=4, sp=True),
    Layout(tp=8),
    Layout(cp=2),
    Layout(cp=4, cp_order="zigzag"),
    Layout(tp=2, cp=2, sp=True),
]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@cache
def model(kind: str) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    torch.manual_seed(3)
    made = (
        Qwen3ForCausalLM(Qwen3Config(**SIZES))
        if kind == "dense"
        else Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **EXPERTS))
    )
    return made.config.to_dict() | {"architectures": [type(made).__name__]}, made.state_dict()


@cache
def samples() -> list[tuple[list[int], int]]:
    generator = torch.Generator().manual_seed(5)
    shapes = ((70, 58), (2, 1), (33, 32), (17, 8))
    return [(torch.randint(0, 200, (length,), generator=generator).tolist(), start) for length, start in shapes]


@cache
def expected(kind: str, numerics: Numerics) -> list[torch.Tensor]:
    return Decoder.from_tensors(*model(kind), numerics).prefill_logprobs_batch(samples())


def same(scores: list[torch.Tensor], wanted: list[torch.Tensor]) -> bool:
    return len(scores) == len(wanted) and all(same_bits(a, b) for a, b in zip(scores, wanted))


FLOAT32 = Numerics(schedule=SCHEDULE)
BFLOAT16 = Numerics(compute="bfloat16", schedule=BACKWARDS)
CASES = [
    *(("dense", FLOAT32, layout) for layout in (LAYOUTS[1], LAYOUTS[2], LAYOUTS[4])),
    *(("dense", BFLOAT16, layout) for layout in (LAYOUTS[2], LAYOUTS[4])),
    *(("experts", Numerics(compute="bfloat16", schedule=SCHEDULE), layout) for layout in (LAYOUTS[1], LAYOUTS[5])),
]


@pytest.mark.parametrize(
    ("kind", "numerics", "layout"),
    CASES,
    ids=[f"{kind}-{n.compute}-tp{one.tp}-cp{one.cp}{'-sp' if one.sp else ''}" for kind, n, one in CASES],
)
def test_a_layout_changes_no_bit(kind: str, numerics: Numerics, layout: Layout) -> None:
    wanted = expected(kind, numerics)
    decoder = Decoder.from_tensors(*model(kind), numerics, layout=layout)
    assert same(decoder.prefill_logprobs_batch(samples()), wanted)
    assert same(decoder.decode_logprobs_batch(samples()), wanted)
    assert same_bits(decoder.chunked(*samples()[0], [3, 17, 64]), wanted[0])


class Reversed:
    """Wrong: ranks arrive in another order, as they may in a reduction by arrival."""

    def __init__(self, group: Any) -> None:
        self.axis, self.size, self.ranks, self._group = group.axis, group.size, group.ranks, group

    def all_gather(self, parts: Any, rows: Any, order: Order) -> list[torch.Tensor]:
        found: list[torch.Tensor] = self._group.all_gather(parts, rows, order)
        return [*found[1:], found[0]] if order == "global_rank_index" else found

    def observed(self) -> tuple[dict[str, Any], ...]:
        return ()


def test_another_order_of_ranks_is_caught() -> None:
    numerics = Numerics(schedule=SCHEDULE)
    mesh = simulated_mesh(tp=4)
    wrong = Decoder.from_tensors(*model("dense"), numerics, layout=Layout(tp=4), mesh=Mesh(Reversed(mesh.tp), mesh.cp))
    scores = wrong.prefill_logprobs_batch(samples())
    wanted = expected("dense", numerics)
    assert not same(scores, wanted)
    torch.testing.assert_close(scores, wanted, atol=1e-4, rtol=0)


def test_real_processes_over_gloo_give_the_bits_of_one(tmp_path: Path) -> None:
    world, layouts = 4, [Layout(tp=2, cp=2, sp=True, cp_order="zigzag"), Layout(cp=4)]
    numerics = Numerics(compute="bfloat16", schedule=SCHEDULE)
    job = {"config": model("experts")[0], "tensors": model("experts")[1], "numerics": numerics, "layouts": layouts}
    torch.save(job | {"samples": samples()}, tmp_path / "job")
    ranks = [
        subprocess.Popen(
            [
                sys.executable,
                str(RANK),
                str(rank),
                str(world),
                *(str(tmp_path / n) for n in ("store", "job", f"a{rank}")),
            ]
        )
        for rank in range(world)
    ]
    try:
        assert [rank.wait(timeout=120) for rank in ranks] == [0] * world
    finally:
        for rank in ranks:
            rank.kill()
    wanted = expected("experts", numerics)
    for number in range(world):
        for layout, answer in zip(layouts, torch.load(tmp_path / f"a{number}", weights_only=False)):
            prefill, decoded, chunked, collectives = answer
            assert same([*prefill, *decoded, chunked], [*wanted, *wanted, wanted[0]]), (number, layout)
            assert {one["backend"] for one in collectives} == {"gloo"}
            assert {one["group"] for one in collectives} >= {a for a in ("tp", "cp") if getattr(layout, a) > 1}


def test_exchanges_are_told_as_events_can_say_them() -> None:
    decoder = Decoder.from_tensors(*model("dense"), Numerics(schedule=SCHEDULE), layout=Layout(tp=2, cp=2))
    assert decoder.collectives == ()
    decoder.prefill_logprobs(*samples()[0])
    told = {(one["group"], one["reduction_order"]) for one in decoder.collectives}
    assert told == {
        ("tp", "global_rank_index"),
        ("tp", "global_vocab_shard_index"),
        ("cp", "global_block_index"),
        ("cp", "global_rank_index"),
    }
    for facts in decoder.collectives:
        event("r", "reference", 0, "collective.observed", **facts)
    assert Decoder.from_tensors(*model("dense")).collectives == ()
    for one in decoder.operators.provenance:
        assert one.to_event("reference").actual_backend == "torch"


@pytest.mark.parametrize(
    ("layout", "schedule", "message"),
    [
        (Layout(tp=3), SCHEDULE, "tp is 3: 8 query heads do not divide"),
        (Layout(tp=16), SCHEDULE, "tp is 16: 8 query heads do not divide"),
        (Layout(tp=8), replace(SCHEDULE, k_leaf=32), "tp is 8, o_proj: .*leaves of K = 128 straddle"),
        (Layout(tp=8), replace(SCHEDULE, vocab_tile=64), "200 has 4 tile.*vocab_tile of at most 25"),
    ],
)
def test_what_a_layout_needs_is_named(layout: Layout, schedule: Schedule, message: str) -> None:
    with pytest.raises(ContractError, match=message):
        Decoder.from_tensors(*model("dense"), Numerics(schedule=schedule), layout=layout)


def test_layouts_that_no_job_has_are_refused() -> None:
    for given, message in (
        ({"tp": 0}, "layout.tp is 0"),
        ({"cp": True}, "layout.cp is True"),
        ({"sp": True}, "choose tp above 1"),
        ({"cp_order": "random"}, "cp_order is 'random'"),
    ):
        with pytest.raises(ContractError, match=message):
            Layout(**given)
    with pytest.raises(ContractError, match="the mesh has tp 2 x cp 1 ranks, the layout 1 x 1"):
        Decoder.from_tensors(*model("dense"), mesh=simulated_mesh(2))
