"""What a Megatron-core job on CPU ranks records: values, weights, layouts, settings; and that it runs as before."""

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("megatron.core")

import rlk_ledger
from rlk_ledger.audit import audit
from rlk_ledger.pairs import pair
from rlk_ledger.verify import verify
from rlk_ledger_sdk.weights import state_digest

pytestmark = [pytest.mark.engines, pytest.mark.filterwarnings("ignore")]  # the engine's imports warn

_spec = importlib.util.spec_from_file_location("megatron_runs", Path(__file__).with_name("megatron_runs.py"))
assert _spec is not None
assert _spec.loader is not None
runs = importlib.util.module_from_spec(_spec)
sys.modules.setdefault("megatron_runs", runs)
_spec.loader.exec_module(runs)


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """Runs a job once per set of options and keeps it for the other tests of this module."""
    held: dict[str, Any] = {}

    def run(world: int = 2, **options: Any) -> Any:
        key = repr((world, sorted(options.items())))
        if key not in held:
            root = tmp_path_factory.mktemp("job")
            if options.pop("exported", False):
                options["export"] = str(root / "exported")
            made = runs.Run(root, world, **options)
            if options.get("ledger", True):
                record_rollout(made)
            held[key] = made.start().wait()
        return held[key]

    return run


def reference(dtype: str) -> list[list[float]]:
    """The same samples by transformers: another engine with the same weights and temperature."""
    import torch
    from transformers import Qwen3ForCausalLM

    network = Qwen3ForCausalLM.from_pretrained(runs.MODEL, dtype=getattr(torch, dtype)).eval()
    out = []
    with torch.no_grad():
        for sample in runs.samples():
            ids = torch.tensor([sample["prompt"] + sample["response"]])
            logits = network(input_ids=ids).logits[0].float() / runs.TEMPERATURE
            n, p = len(sample["response"]), len(sample["prompt"])
            values = torch.log_softmax(logits, -1)[p - 1 : p - 1 + n]
            out.append(values.gather(1, ids[0, p:, None])[:, 0].tolist())
    return out


def record_rollout(run: Any) -> None:
    """The other side of the run: transformers' own log-probabilities of the same samples."""
    dtype = run.job.get("dtype", "bfloat16")
    rlk_ledger.init(
        run.job["ledger"],
        run_id="r",
        role="rollout",
        roles={"rollout": 1, "training": run.job["world"]},
        spool=run.job["spool"],
        shipper="off",
    )
    body = {"mode": "processed", "temperature": runs.TEMPERATURE, "compute_dtype": dtype}
    contract = rlk_ledger.record("contract.declared", kind="logprob", version="1", body=body).contract_id
    with rlk_ledger.scope(step=0):
        for sample, values in zip(runs.samples(), reference(dtype)):
            n = len(sample["response"])
            rlk_ledger.record(
                "rollout.sample",
                sample_id=sample["sample_id"],
                prompt_token_ids=sample["prompt"],
                response_token_ids=sample["response"],
                loss_mask=[int(one) for one in sample["mask"]],
                weight_spans=[{"version": "v0", "start": 0, "end": n}],
            )
            rlk_ledger.record(
                "logprobs",
                sample_id=sample["sample_id"],
                source="rollout",
                values=values,
                contract_id=contract,
                weight_version="v0",
            )
    rlk_ledger.close()


def errors(run: Any) -> dict[str, dict[str, Any]]:
    """The findings that are no information, by id."""
    return {f.finding_id: f.where for f in audit(run.history()).findings if f.severity != "info"}


def test_two_tensor_ranks_pair_cleanly_and_give_the_engines_own_values(job: Callable[..., Any]) -> None:
    """Claim: partials of two ranks, which never talked to each other, merge into what the engine itself computed."""
    run = job(2, dtype="float32")
    pairing = pair(run.history())
    assert errors(run) == {}
    assert len(pairing.pairs) == len(runs.samples())
    own = run.result(0)["values"]
    for one, values, other in zip(pairing.pairs, own, reference("float32")):
        assert one.paired.all()
        np.testing.assert_allclose(one.training, values, rtol=0, atol=4e-6)
        np.testing.assert_allclose(one.training, other, rtol=0, atol=2e-5)
        assert one.pass_id == "logprob"
    assert {p.series.first.pass_id for p in pairing.passes} == {"train"}


def test_every_rank_records_its_shard(job: Callable[..., Any]) -> None:
    """Claim: each tensor rank has one event a sample and pass, with its own vocabulary range and partials."""
    events = job(2, dtype="float32").events("logprobs")
    mine = [e for e in events if e["source"] == "training" and e["pass_id"] == "logprob"]
    assert len(mine) == 2 * len(runs.samples())
    ranges = {(e["shard"]["rank"], tuple(map(tuple, e["shard"]["ranges"]))) for e in mine}
    assert ranges == {(0, ((0, 136),)), (1, ((136, 272),))}
    assert all({"partials.max", "partials.sum_exp", "partials.target_logit"} <= e.keys() for e in mine)
    assert all(e["metadata_source"] == {"values": "absent", "partials": "measured"} for e in mine)


def test_a_missing_tensor_rank_is_named(job: Callable[..., Any]) -> None:
    """Claim: when rank 1 records nothing, the audit names it, and no value is made of half a vocabulary.

    What the job asked for and did not get is named too.
    """
    run = job(2, silent=[1], requested={"attention.backend": "flash", "no.such.setting": 1})
    found = errors(run)
    assert found["evidence.shards_missing"]["missing_ranks"] == [1]
    gaps = run.events("gap")
    assert [g["kind"] for g in gaps] == ["internal"]
    assert "ranks [1] gave nothing" in gaps[0]["reason"]
    assert pair(run.history()).pairs == []
    assert found["backend.not_in_force"] == {"path": "attention.backend", "status": "fallback"}
    knobs = {e["path"]: e["status"] for e in run.events("knob.applied")}
    assert knobs["no.such.setting"] == "unobservable"


@pytest.mark.parametrize(
    "options",
    [
        {"world": 1, "again": True},
        {"give_values": True},
        {"vocab": 384, "vocab_size": 272, "profile": True},
        {"tp": 1, "pp": 2},
    ],
    ids=["alone", "tp2", "tp2 padded vocabulary", "pp2"],
)
def test_the_published_digest_is_that_of_the_checkpoint(job: Callable[..., Any], options: dict[str, Any]) -> None:
    """Claim: the sharded live weights have the `state_digest` of the Hugging Face file, before and after a step."""
    from safetensors.torch import load_file

    run = job(exported=True, **options)
    published = {e["weight_version"]: e for e in run.events("weights.published")}
    assert published.keys() == {"v0", "v0+1"}
    for version, folder in (("v0", runs.MODEL), ("v0+1", run.job["export"])):
        tensors = load_file(Path(folder) / "model.safetensors")
        digest, each = state_digest(tensors)
        event = published[version]
        assert event["digest"] == digest
        assert event["tensor_count"] == len(tensors)
        assert "skipped" not in event
        assert {t["name"]: t["digest"] for t in event["tensors"]} == each
        assert {t["name"]: tuple(t["shape"]) for t in event["tensors"]} == {
            n: tuple(t.shape) for n, t in tensors.items()
        }
    assert published["v0"]["digest"] != published["v0+1"]["digest"]


def test_a_run_that_begins_after_attach_hears_what_the_rank_runs(job: Callable[..., Any]) -> None:
    """Claim: after a second init() settings and contracts are in the new run too, once, as they were in the first."""
    run = job(exported=True, world=1, again=True)

    def said(run_id: str) -> list[Any]:
        knobs = [(e["path"], e.get("actual")) for e in run.events("knob.applied", run_id)]
        kinds = [e["kind"] for e in run.events("contract.declared", run_id) if e["kind"] != "logprob"]
        return [knobs, kinds]

    assert said("r") == said("before")
    assert len(said("r")[0]) > 10
    declared = {e["contract_id"] for e in run.events("contract.declared")}
    assert {e["contract_id"] for e in run.events("logprobs")} <= declared


def test_the_last_pipeline_stage_records_the_scores(job: Callable[..., Any]) -> None:
    """Claim: with two stages the last one records whole values, the first one none, and they pair cleanly."""
    run = job(exported=True, tp=1, pp=2)
    pairing = pair(run.history())
    assert errors(run) == {}
    for one, values in zip(pairing.pairs, run.result(1)["values"]):
        assert one.paired.all()
        np.testing.assert_allclose(one.training, values, rtol=0, atol=4e-6)
    stage = {e["writer_id"]: e["parallel"]["pp"]["rank"] for e in run.events("writer.opened") if "parallel" in e}
    assert {stage[e["writer_id"]] for e in run.events("logprobs") if e["source"] == "training"} == {1}
    assert {stage[e["writer_id"]] for e in run.events("weights.published")} == {0}


def test_a_wrapped_model_is_watched_under_its_wrapping(job: Callable[..., Any]) -> None:
    """Claim: inside DistributedDataParallel and Float16Module the same is seen, each replica its samples."""
    run = job(2, tp=1, wrap=True)
    pairing = pair(run.history())
    assert errors(run) == {}
    assert all(one.paired.all() for one in pairing.pairs)
    assert len(pairing.pairs) == len(runs.samples())
    knobs = {e["path"]: e["actual"] for e in run.events("knob.applied") if "actual" in e}
    assert knobs["gradients.reduce_dtype"] == "float32"
    assert knobs["ddp.use_distributed_optimizer"] is False
    assert {e["op"] for e in run.events("collective.observed")} == {"gradients.reduce"}
    published = run.events("weights.published")
    assert len(published) == 1  # one for both replicas
    timed = {e.get("collective") or e.get("operator"): e for e in run.events("segment.timed")}
    assert timed["all-grads-sync"]["exposed_ns"] > 0  # Megatron's own timer around the gradient reduction
    orders = sorted(e["sample_order"] for e in run.events("batch.layout") if "/logprob/" in e["layout_id"])
    assert orders == [["s0", "s2", "s4"], ["s1", "s3"]]


@pytest.mark.parametrize("options", [{"give_values": True}, {"reduce": True}])
def test_recording_changes_no_bit_of_the_job(job: Callable[..., Any], options: dict[str, Any]) -> None:
    """Claim: losses, gradients, scores and the weights after a step are the same bits with recording on and off."""
    on, off = job(2, exported=True, **options), job(2, exported=True, ledger=None)
    for rank in (0, 1):
        assert on.result(rank) == off.result(rank)


def test_values_the_engine_gives_are_recorded_as_they_are(job: Callable[..., Any]) -> None:
    """Claim: given values are measured, equal on both ranks and equal to the engine's bits."""
    run = job(2, give_values=True, exported=True)
    events = [e for e in run.events("logprobs") if e["source"] == "training" and e["pass_id"] == "logprob"]
    own = {s["sample_id"]: v for s, v in zip(runs.samples(), run.result(0)["values"])}
    for event in events:
        held = np.frombuffer(event["values"].data, np.float32)
        assert held.tolist() == own[event["sample_id"]]
        assert event["metadata_source"]["values"] == "measured"
    assert errors(run) == {}


def test_announced_values_are_recorded_under_the_contract_of_the_logits(job: Callable[..., Any]) -> None:
    """Claim: a rank that was told values follow records them, bits and contract, as one that computed its own."""
    both = [job(1, give_values=True, values_follow=follow) for follow in (False, True)]
    told = [
        {
            e["sample_id"]: (e["values"].data, e["contract_id"], e["metadata_source"])
            for e in run.events("logprobs")
            if e["source"] == "training" and e["pass_id"] == "logprob"
        }
        for run in both
    ]
    assert told[0] == told[1]
    assert len(told[0]) == len(runs.samples())


def test_reduced_values_need_no_other_rank(job: Callable[..., Any]) -> None:
    """Claim: with `reduce=True` each rank holds the whole value, equal to the engine's own to float32 rounding."""
    run = job(2, reduce=True, exported=True)
    events = [e for e in run.events("logprobs") if e["source"] == "training" and e["pass_id"] == "logprob"]
    own = {s["sample_id"]: v for s, v in zip(runs.samples(), run.result(0)["values"])}
    for event in events:
        held = np.frombuffer(event["values"].data, np.float32)
        np.testing.assert_allclose(held, own[event["sample_id"]], rtol=0, atol=4e-6)
    assert errors(run) == {}  # two replicas of every value, and they agree


def test_layouts_are_recorded_once_a_micro_batch(job: Callable[..., Any]) -> None:
    """Claim: the owner alone records a layout, and every score of every rank names it."""
    run = job(2, dtype="float32")
    layouts = run.events("batch.layout")
    assert [(e["sample_order"], e["padding_side"], e["packing"]) for e in layouts] == [
        (["s0", "s1", "s2"], "right", False),
        (["s3", "s4"], "right", False),
    ] * 2
    names = {e["layout_id"] for e in layouts}
    assert len(names) == 4
    assert {e["layout_id"] for e in run.events("logprobs") if e["source"] == "training"} == names


def test_settings_contracts_and_collectives_come_from_the_live_job(job: Callable[..., Any]) -> None:
    """Claim: what is declared is what the modules show, and no order of summation is claimed."""
    run = job(2, give_values=True, exported=True)
    knobs = {e["path"]: e for e in run.events("knob.applied")}
    assert knobs["model.dtype"]["actual"] == "bfloat16"
    assert knobs["parallel.tp"]["actual"] == 2
    assert knobs["attention.module"]["actual"] == "DotProductAttention"
    assert knobs["sequence_parallel"]["actual"] is False
    assert knobs["bias_dropout_fusion"]["status"] == "unobservable"
    bodies = {
        e["kind"]: e["body"]
        for e in run.events("contract.declared")
        if "head_dtype" in e["body"] or e["kind"] != "logprob"
    }
    assert bodies["logprob"]["logits_dtype"] == bodies["logprob"]["head_dtype"] == "bfloat16"
    assert bodies["logprob"]["temperature"] == runs.TEMPERATURE
    assert bodies["norm"] == {"eps": 1e-6, "accumulate_dtype": "float32", "rounding_order": "kernel"}
    assert bodies["rope"]["theta"] == 10000.0
    ops = {e["op"]: e for e in run.events("collective.observed")}
    assert set(ops) == {"row_parallel.all_reduce", "vocab_parallel_cross_entropy.all_reduce"}
    assert all(e["reduction_order"] == "arrival" and e["backend"] == "gloo" for e in ops.values())
    writers = [e for e in run.events("writer.opened") if e["role"] == "training"]
    assert sorted(e["parallel"]["tp"]["rank"] for e in writers) == [0, 1]
    assert {e["engine"]["instance"] for e in writers} == {"training-0"}


def test_a_profiled_range_gives_computation_and_communication_apart(job: Callable[..., Any]) -> None:
    """Claim: in a profile of two tensor ranks the forward's all-reduces are segments of their own."""
    run = job(exported=True, vocab=384, vocab_size=272, profile=True)
    events = run.events("segment.timed")
    compute = [e for e in events if e.get("operator") == "rescore"]
    reduce = [e for e in events if e.get("collective") == "gloo:all_reduce"]
    assert len(compute) == len(reduce) == 2
    for one, other in zip(compute, reduce):
        assert 0 < one["compute_ns"] < one["elapsed_ns"]
        assert other["part_of"] == "rescore"
        assert other["exposed_ns"] + other["overlapped_ns"] > 0
        assert other["calls"] >= 8  # two row-parallel projections in each of four layers
    assert {e.get("operator") for e in events} == {"rescore", None}


@pytest.mark.parametrize("killed", [[1], [0, 1]], ids=["one rank", "all ranks"])
def test_a_killed_rank_loses_nothing_acknowledged(tmp_path: Path, killed: list[int]) -> None:
    """Claim: after SIGKILL of one or all ranks every event whose number was acknowledged is in the ledger, unbroken."""
    acks = tmp_path / "acks"
    acks.mkdir()
    run = runs.Run(tmp_path, 2, acks=str(acks)).start()
    try:
        told = run.wait_for(lambda: [len(f.read_text().splitlines()) for f in acks.iterdir()] or [0], 2, 4)
        assert told, "the ranks never acknowledged a pass"
        for rank in killed:
            run.processes[rank].kill()
        run.processes[killed[0]].wait()
    finally:
        run.stop()
    held: dict[str, set[int]] = {}
    for writer, seq, _, _ in run.ledger().read_events("r"):
        held.setdefault(writer, set()).add(seq)
    for rank in (0, 1):
        writer, last = (acks / str(rank)).read_text().splitlines()[-1].split()
        assert set(range(int(last) + 1)) <= held[writer]
    assert verify(run.ledger(), "r").exit_code != 1
