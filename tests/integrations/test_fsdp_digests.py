"""FSDP over two real processes (gloo, CPU): sharded digests equal unsharded ones; ranks record their own samples."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import rlk_ledger
from rlk_ledger.integrations import transformers as hf
from rlk_ledger_sdk.testing import capture
from rlk_ledger_sdk.weights import state_digest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch is built without distributed"),
]

HERE = Path(__file__).parent
WAYS = (
    "fsdp2", "fsdp2-mixed", "fsdp2-hybrid", "fsdp2-root-only",
    "fsdp1", "fsdp1-flat", "fsdp1-replicated", "fsdp1-mixed",
)  # fmt: skip


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """The folder of one run of both ranks, and what each wrote."""
    folder = tmp_path_factory.mktemp("fsdp")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("RLK_", "PYTEST_"))}
    environment |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, str(HERE / "fsdp_ranks.py")]
    processes = [
        subprocess.Popen([*command, str(rank), str(folder)], env=environment, stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    errors = [process.communicate(timeout=200)[1] for process in processes]
    for process, error in zip(processes, errors):
        assert process.returncode == 0, error[-3000:]
    return folder, [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("way", WAYS)
def test_the_sharded_digest_is_the_unsharded_one_before_and_after_a_step(ran: Any, way: str) -> None:
    one, other = (rank["ways"][way] for rank in ran[1])
    assert one["sharded"] == one["before"]
    assert one["after"] == one["gathered"] != one["before"]
    assert (one["sharded"], one["after"], one["names"]) == (other["sharded"], other["after"], other["names"])
    assert "lm_head.weight" not in one["names"]
    assert len(one["names"]) == 46


def test_each_rank_sums_its_own_part_only(ran: Any) -> None:
    ranks = [rank["ways"] for rank in ran[1]]
    assert ranks[1]["fsdp1-replicated"]["empty"] == 46  # whole on both: the first rank alone counts it
    assert [r["fsdp2-hybrid"]["empty"] for r in ranks] == [0, 46]
    assert ranks[0]["fsdp2"]["empty"] == ranks[1]["fsdp2"]["empty"] == 0
    assert 0 < ranks[0]["fsdp1"]["empty"] < 46


def test_a_tensor_cut_along_its_second_axis_sums_to_the_whole(ran: Any) -> None:
    for rank in ran[1]:
        assert rank["columns"]["cut"] == rank["columns"]["whole"]


def test_sharding_and_mixed_precision_are_read_back_and_are_the_dtype_computed_in(ran: Any) -> None:
    ways = ran[1][0]["ways"]
    plain, mixed, flat = (ways[way]["settings"] for way in ("fsdp2", "fsdp2-mixed", "fsdp1-mixed"))
    assert (plain["fsdp.kind"], plain["fsdp.modules"], plain["fsdp.placements"]) == ("fsdp2", 5, {"S(0)": 46})
    assert (mixed["fsdp.param_dtype"], mixed["fsdp.reduce_dtype"]) == ("bfloat16", "float32")
    assert mixed["model.dtype"] == "float32"
    assert (flat["fsdp.kind"], flat["fsdp.placements"]) == ("fsdp1", {"FULL_SHARD": 46})
    contracts = {way: ways[way]["contract"] for way in WAYS}
    assert {way: (c["compute_dtype"], c["head_dtype"]) for way, c in contracts.items()} == {
        way: ("bfloat16", "bfloat16") if way.endswith("mixed") else ("float32", "float32") for way in WAYS
    }


def test_each_rank_records_its_own_samples_and_the_weights_are_recorded_once(ran: Any) -> None:
    events = [
        (role, event, arrays) for role, _, event, arrays in rlk_ledger.open(ran[0] / "ledger").read_events("fsdp")
    ]
    writers = {e["writer_id"]: e for _, e, _ in events if e["type"] == "writer.opened"}
    assert sorted((w["rank"], w["parallel"]["dp"]["rank"]) for w in writers.values()) == [(0, 0), (1, 1)]
    by_rank: dict[int, set[str]] = {0: set(), 1: set()}
    for _, event, _ in events:
        if event["type"] == "logprobs":
            by_rank[writers[event["writer_id"]]["rank"]].add(event["sample_id"])
    assert by_rank == {0: {"s0", "s2"}, 1: {"s1", "s3"}}
    published = [e for _, e, _ in events if e["type"] == "weights.published"]
    model = transformers.Qwen3ForCausalLM.from_pretrained(
        str(HERE.parent.parent / "replay" / "rlk_ledger_replay" / "model"), dtype=torch.float32
    )
    assert [p["digest"] for p in published] == [state_digest(hf.held_tensors(model))[0]]
    asked = [e for _, e, _ in events if e["type"] == "knob.applied" and e["path"] == "fsdp.param_dtype"]
    assert {e["status"] for e in asked} == {"fallback"}  # asked for bfloat16, sharded without a policy


def test_a_rank_that_does_not_record_costs_the_digest_and_not_the_job(ran: Any) -> None:
    assert [rank["silent"] for rank in ran[1]] == [None, None]
    events = [event for _, _, event, _ in rlk_ledger.open(ran[0] / "ledger").read_events("silent")]
    assert not [event for event in events if event["type"] == "weights.published"]
    assert ["ranks [1] gave nothing" in event["reason"] for event in events if event["type"] == "gap"] == [True]


def test_one_process_without_a_group_is_rank_zero_of_one() -> None:
    from rlk_ledger.integrations.fsdp import is_sharded, place

    assert place() == {"rank": 0, "world_size": 1}
    assert not is_sharded(torch.nn.Linear(2, 2))


def test_an_unsharded_model_has_the_same_digest_both_ways() -> None:
    from rlk_ledger.integrations.fsdp import partial_sums
    from rlk_ledger_schemas.fingerprints import sum64x2_digest

    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
    with capture():
        assert sum64x2_digest(partial_sums(model).values()) == state_digest(hf.held_tensors(model))[0]
