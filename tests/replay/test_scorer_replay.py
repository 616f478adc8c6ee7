"""Live engines in a replay: what they give, what they add to the answer, and what a missing one costs."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from rich.console import Console

from rlk_ledger.history import load_history
from rlk_ledger.ledger import Ledger
from rlk_ledger.pairs import PairedSample, pair
from rlk_ledger_replay import screen
from rlk_ledger_replay.arms import ARMS, References
from rlk_ledger_replay.decoder import Decoder
from rlk_ledger_replay.floor import floor_moment, floors
from rlk_ledger_replay.intervals import draw
from rlk_ledger_replay.live import findings, judge_live
from rlk_ledger_replay.numerics import Numerics
from rlk_ledger_replay.preparation import Request
from rlk_ledger_replay.replay_command import replay as command
from rlk_ledger_replay.report import live as shown
from rlk_ledger_replay.report.answers import Answer as Answered
from rlk_ledger_replay.report.gather import gather
from rlk_ledger_replay.report.headline import headline, unmeasured
from rlk_ledger_replay.report.page import render
from rlk_ledger_replay.result import NUMBERS
from rlk_ledger_replay.run import ReplayResult, replay
from rlk_ledger_replay.scorers.child import Answer, run_child
from rlk_ledger_replay.scorers.engines import Live, parse_pythons, parse_scorers
from rlk_ledger_replay.scorers.held import head_product
from rlk_ledger_replay.scorers.layouts import Layouts
from rlk_ledger_replay.scorers.plan import Attempt, LiveScores
from rlk_ledger_replay.scorers.protocol import Guard, Job, Layout, Pass, sequence
from rlk_ledger_replay.scores import Tokens
from rlk_ledger_replay.shares import moments, shares
from rlk_ledger_replay.weights import live_digest
from rlk_ledger_schemas.errors import UsageError

Make = Callable[..., Ledger]
MODEL = Path(screen.__file__).parent / "model"
VLLM, REFERENCE, TRANSFORMERS = parse_scorers(["vllm", "reference@rollout", "transformers"])


def prose(count: int) -> list[tuple[list[int], int]]:
    text = (__doc__ or "").encode() * 8
    return [([256, *text[17 * i : 17 * i + 20 + 3 * i], *text[300 + i : 330 + i]], 21 + 3 * i) for i in range(count)]


def job(engine: str, dtype: str = "float32", padding: Any = "right", **changes: Any) -> Job:
    texts = prose(3)
    together = Layout("together", ((0, 1, 2),), padding)
    alone = Layout("alone", ((0,), (1,), (2,)), "none")
    fields: dict[str, Any] = {
        "engine": engine,
        "folder": str(MODEL),
        "weights": live_digest(Decoder.load(MODEL).checkpoint.tensors),
        "dtype": dtype,
        "mode": "processed",
        "sequences": tuple(sequence(ids, start, 0.7 + 0.1 * index) for index, (ids, start) in enumerate(texts)),
        "passes": tuple(
            Pass(f"{path}.{layout.name}", path, layout)  # type: ignore[arg-type]
            for path in ("prefill", "decode")
            for layout in (together, alone)
        ),
    }
    return Job(**(fields | changes))


def run(job: Job) -> Answer:
    answer = run_child(f"rlk_ledger_replay.scorers.{job.engine}", job, python=sys.executable, timeout=200)
    assert answer.problems == {}
    return answer


def flat(rows: list[Any]) -> Any:
    return np.concatenate([np.asarray(row) for row in rows])


@pytest.fixture(scope="module")
def transformers32() -> Answer:
    return run(job("transformers", padding="left"))


def test_the_transformers_scorer_gives_what_a_direct_forward_gives(transformers32: Answer) -> None:
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(str(MODEL), dtype=torch.float32, attn_implementation="sdpa").eval()
    for index, (ids, start) in enumerate(prose(3)):
        with torch.inference_mode():
            logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, start - 1 : -1].float()
        wanted = torch.log_softmax(logits / (0.7 + 0.1 * index), -1).gather(-1, torch.tensor(ids[start:])[:, None])
        np.testing.assert_allclose(transformers32.values["prefill.alone"][index], wanted[:, 0].numpy(), atol=2e-5)


def test_both_paths_and_padded_batches_of_transformers_mean_the_same_tokens(transformers32: Answer) -> None:
    reference = [
        Decoder.load(MODEL, Numerics(temperature=0.7 + 0.1 * index)).prefill_logprobs_batch([text])[0]
        for index, text in enumerate(prose(3))
    ]
    assert set(transformers32.values) == {"prefill.together", "prefill.alone", "decode.together", "decode.alone"}
    for values in transformers32.values.values():
        np.testing.assert_allclose(flat(values), flat(reference), atol=1e-4)


def test_a_raw_job_ignores_the_temperature() -> None:
    answer = run(job("transformers", mode="raw"))
    reference = Decoder.load(MODEL, Numerics(logprob_mode="raw")).prefill_logprobs_batch(prose(3))
    np.testing.assert_allclose(flat(answer.values["prefill.together"]), flat(reference), atol=1e-4)


def test_what_an_engine_holds_is_compared_with_the_checkpoint(transformers32: Answer, weights: Path) -> None:
    assert transformers32.statement is not None
    status = {guard.name: guard.status for guard in transformers32.statement.guards}
    assert status["weights.held"] == "passed"
    other = run(job("transformers", "bfloat16", folder=str(weights / "v1"), passes=job("x").passes[:1]))
    assert other.statement is not None
    found = {guard.name: guard for guard in other.statement.guards}["weights.held"]
    assert found.status == "failed", "the digest the job names is that of another checkpoint"
    assert found.evidence["digest"] != found.evidence["expected"]


def test_the_head_rounds_where_it_is_declared_to_and_nowhere_else() -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 64, generator=generator).bfloat16() for n in (5, 40))
    exact = hidden.double() @ weight.double().T
    wide = head_product(hidden, weight, torch.bfloat16, torch.float32)
    assert wide.dtype == torch.float32
    assert (wide.double() - exact).abs().max() < 1e-4, "operands that are bf16 already lose nothing"
    narrow = head_product(hidden, weight, torch.bfloat16, torch.bfloat16)
    assert narrow.dtype == torch.bfloat16
    assert (narrow.double() - exact).abs().max() > 1e-3, "the product is rounded"
    rounded = head_product(hidden.float() * 1.001, weight, torch.bfloat16, torch.float32)
    kept = head_product(hidden.float() * 1.001, weight, torch.float32, torch.float32)
    assert not torch.equal(rounded, kept), "operands are rounded to the head's dtype"


def test_the_reference_in_a_process_of_its_own_gives_the_same_bits() -> None:
    answer = run(job("reference", "bfloat16", head="float32"))
    for index, text in enumerate(prose(3)):
        numerics = Numerics(compute="bfloat16", lm_head="float32", temperature=0.7 + 0.1 * index)
        wanted = Decoder.load(MODEL, numerics).prefill_logprobs_batch([text])[0].numpy()
        for values in answer.values.values():
            assert values[index].tobytes() == wanted.tobytes()


def replayed(ledger: Ledger, *scorers: str, **live: Any) -> ReplayResult:
    asked = Live(parse_scorers(scorers), **{"pythons": parse_pythons([]), "timeout": 200.0, **live})
    return replay(ledger, "r1", where="step = 0", request=Request(live=asked))


def test_a_live_engine_changes_neither_shares_nor_decision_and_everything_is_recorded(make_run: Make) -> None:
    ledger = make_run(groups=8)
    plain = replay(ledger, "r1", where="step = 0", keep=False)
    result = replayed(ledger, "reference@rollout", "reference", float32=True)
    assert list(result.to_dict()["numbers"]) == list(plain.to_dict()["numbers"]) == list(NUMBERS)
    assert (result.decision.decision, result.exit_code) == (plain.decision.decision, 0)
    assert result.numbers()["share_rollout"] == plain.numbers()["share_rollout"]
    found = result.judgement.live
    assert found is not None
    assert found.agree32 is True
    assert found.shares32 == result.judgement.shares, "the float32 runs of the reference are the reference"
    scorers = result.to_dict()["numbers"]["live"]["scorers"]
    assert set(scorers) == {"reference@rollout", "reference"}
    assert set(scorers["reference"]["roles"]) == {"prefill", "alone", "float32"}
    cases = ledger.sql(
        "select arm, status from cases where arm like 'live:%' and status is not null order by all"
    ).fetchall()
    assert ("live:reference@rollout:decode", "completed") in cases
    assert len(cases) == 4 + 3, "one case for each role of each engine"
    source = "replay:reference.rollout-decode"
    assert ledger.sql(f"select count(*) from logprobs where source = '{source}'").fetchall() == [(8,)]
    kept = [fields for _, _, fields, _ in ledger.read_events("r1", types=["verdict.reached"])]
    assert set(kept[-1]["evidence"]["live"]["scorers"]) == set(scorers)
    report = gather(ledger, "r1")
    assert [one.name for one in shown.engines(report.lead)] == ["reference@rollout", "reference"]
    assert [one.name for one in shown.chains(report.lead)] == ["reference@rollout"]
    assert {arm["arm"] for arm in report.lead.arms} == set(ARMS), "the four arms stay four"
    assert "Chain decomposition by reference@rollout" in render(report)
    text = Console(width=100, record=True, file=io.StringIO())
    screen.show(result, ledger.url, text)
    assert "chain by reference@rollout" in text.export_text()


@pytest.mark.parametrize("live", [3, [], {"scorers": {"x": 3, "y": {"statements": 5}}, "attempts": "a", "chain": 1}])
def test_a_report_leaves_out_evidence_of_another_shape(live: Any) -> None:
    answer = Answered("w", verdict={"evidence": {"live": live}})
    assert [one.name for one in shown.engines(answer)] == (["y"] if isinstance(live, dict) else [])
    assert shown.chains(answer) == []


def test_the_links_of_the_live_chain_add_up_and_their_parts_to_one(make_run: Make) -> None:
    result = replayed(make_run(groups=8), "reference@rollout", "reference")
    found = result.judgement.live
    assert found is not None
    links = dict(found.chains["reference@rollout"])
    whole = links.pop("training_over_rollout")
    assert list(links) == [
        "decode_over_rollout",
        "prefill_over_decode",
        "reference_over_prefill",
        "training_over_reference",
    ]
    assert sum(one.mean for one in links.values()) == pytest.approx(whole.mean, abs=1e-9)
    assert sum(one.part.value for one in links.values() if one.part) == pytest.approx(1.0)
    assert links["prefill_over_decode"].rms.value == 0.0, "the reference's two paths agree bit for bit"


def test_a_side_that_used_other_weights_cannot_be_had_again(make_run: Make) -> None:
    ledger = make_run(groups=8, computes_version={"rollout": {"v0": "v1"}, "training": {}})
    found = replayed(ledger, "reference@rollout", "reference").judgement.live
    assert found is not None
    rollout, training = (one.times for one in found.stood)
    assert rollout is not None
    assert training is not None
    assert training.high < 2.0 < rollout.low


def test_a_missing_engine_leaves_a_gap_that_says_what_would_measure_it(make_run: Make) -> None:
    ledger = make_run(groups=8)
    python = sys.executable
    result = replayed(ledger, "megatron", pythons={"megatron": python})
    if any(one.finding_id == "replay.failed" for one in result.findings):
        (gap,) = [one for one in result.findings if one.finding_id == "replay.failed"]
        assert gap.where == {"scorer": "megatron", "arms": ["alone", "prefill"]}
        assert "pip install megatron-core" in gap.evidence["reason"]
        assert "--scorer-python megatron=PATH" in gap.evidence["reason"]
        assert (result.verdict, result.exit_code) == ("inconclusive", 3)
        assert result.decision.decision == "within_floor", "the reference's answer stands beside it"
    else:
        pytest.skip("Megatron-core is installed here")


def test_an_engine_that_fails_is_an_error_attempt_and_the_replay_goes_on(make_run: Make) -> None:
    ledger = make_run(groups=8)
    result = replayed(ledger, "reference", "reference@rollout", pythons={"reference": "/nowhere/python"})
    assert result.decision.decision == "within_floor"
    assert result.exit_code == 3
    statuses = ledger.sql("select distinct status from cases where arm like 'live:%'").fetchall()
    assert statuses == [("error",)]


def test_what_leaves_a_replay_undecided_is_said_first_and_once(make_run: Make) -> None:
    """The drift is within its floor and an engine that was asked for could not be had: the reader learns both."""
    ledger = make_run(groups=8)
    result = replayed(ledger, "reference", pythons={"reference": "/nowhere/python"})
    text = Console(width=200, record=True, file=io.StringIO())
    screen.show(result, ledger.url, text)
    assert text.export_text().startswith("INCONCLUSIVE · replay.failed: an arm of the replay could not be measured")
    (gap,) = [one for one in result.findings if one.severity == "gap"]
    assert gap.next_step.startswith("The reference scorer has no values: ")
    report = gather(ledger, "r1")
    assert "An arm of the replay could not be measured (scorer reference" in headline(report).happened
    assert "times its measured noise floor" in headline(report).happened
    lines = unmeasured(report)
    assert len(lines) == len(set(lines))
    assert sum("/nowhere/python" in line for line in lines) == 2, "one line for each of its two roles"


def test_engines_are_not_started_where_the_reference_could_not_score(make_run: Make) -> None:
    ledger = make_run(groups=8, publish_digest="sum64x2:" + "0" * 32)
    result = replayed(ledger, "reference", pythons={"reference": "/nowhere/python"})
    assert result.judgement.live is None
    rows = ledger.sql("select arm, status, reason from cases where arm like 'live:%'").fetchall()
    assert [row[:2] for row in rows] == [("live:reference", "not_measured")]


def tokens(n: int = 400, groups: int = 10) -> Tokens:
    rng = np.random.default_rng(0)
    index = np.arange(n, dtype=np.int64)
    base = -rng.exponential(1.0, n)
    r, t = ((base + 0.01 * rng.standard_normal(n)).astype(np.float32) for _ in range(2))
    return Tokens(index // 20, index % 20, np.zeros(n, np.int64), index * groups // n, r, t)


def judged(values: dict[Any, Any], guards: list[Guard] | None = None) -> Any:
    told = tokens()
    ref = ((told.rollout_N.astype(np.float64) + told.training_N) / 2).astype(np.float32)
    draws = draw(told.cluster_N, 0)
    parts = shares(moments(told.rollout_N.astype(float) - ref, told.training_N.astype(float) - ref, draws), draws)
    noise = np.random.default_rng(1).standard_normal((4, len(told))) * 0.01
    wanted = tuple(dict.fromkeys(one for one, _ in values))
    scores = LiveScores(wanted, values, guards={one: guards or [] for one in wanted})
    scores.attempts = [Attempt(one, role, 0, "completed", "", "together") for one, role in values]
    found = judge_live(scores, told, References(ref, ref, ref), draws, parts, {"rollout": noise, "training": noise})
    return found, told, draws, noise


def test_two_layouts_that_agree_bit_for_bit_are_no_floor_and_two_that_differ_are() -> None:
    told = tokens()
    moved = (told.rollout_N + np.float32(0.02)).astype(np.float32)
    found, *_ = judged({(VLLM, "decode"): told.rollout_N, (VLLM, "alone"): told.rollout_N.copy()})
    assert found.native == {}
    assert found.stood[0].layouts.rms.value == 0.0
    found, *_ = judged({(VLLM, "decode"): told.rollout_N, (VLLM, "alone"): moved})
    assert found.stood[0].floor.value == pytest.approx(0.02 / np.sqrt(2), rel=1e-4)
    assert set(found.native) == {"rollout"}


@pytest.mark.parametrize("status", ["failed", "unknown"])
def test_a_guard_that_did_not_pass_keeps_the_layouts_out_of_the_floor(status: Any) -> None:
    told = tokens()
    moved = (told.rollout_N + np.float32(0.02)).astype(np.float32)
    guard = Guard("chunked_prefill.off", status, "the scheduler may cut prompts into chunks")
    found, *_ = judged({(VLLM, "decode"): told.rollout_N, (VLLM, "alone"): moved}, [guard])
    assert found.native == {}
    raised = [one.finding_id for one in findings(found)]
    assert raised == (["variant.did_not_apply"] if status == "failed" else [])
    assert found.stood[0].applied == (status != "failed")


def test_the_larger_of_the_two_floors_counts_and_both_are_told() -> None:
    _, told, draws, noise = judged({})
    found = moments(noise[0], noise[1], draws)
    for scale, source in ((0.1, "native"), (0.001, "placebo")):
        native = np.full((1, len(told)), scale)
        measured = floors(found, noise, noise, draws, {"rollout": native})
        assert measured.source == {"rollout": source, "training": "placebo"}
        assert measured.native["rollout"].value == pytest.approx(scale)
        assert measured.rollout is not None
        assert measured.rollout.value == pytest.approx(max(scale, measured.placebo["rollout"].value))
    assert floor_moment(None, native, draws)[0] is None, "layouts alone are a lower bound, not a floor"


def test_float32_runs_that_contradict_the_reference_are_said() -> None:
    told = tokens()
    found, *_ = judged({(VLLM, "float32"): told.rollout_N, (TRANSFORMERS, "float32"): (told.rollout_N)})
    assert found.agree32 is False
    assert [one.finding_id for one in findings(found)] == ["evidence.incomplete"]


def test_a_value_missing_at_one_token_is_no_value() -> None:
    told = tokens()
    holed = told.rollout_N.copy()
    holed[7] = np.nan
    found, *_ = judged({(VLLM, "decode"): holed, (VLLM, "prefill"): told.rollout_N})
    assert found.stood[0].reproduction is None
    assert found.chains == {}


def test_scorers_and_interpreters_are_named_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [one.label for one in parse_scorers(["vllm", "transformers@rollout"])] == ["vllm", "transformers@rollout"]
    for bad in (["vlm"], ["vllm@left"], ["vllm", "vllm@rollout"]):
        with pytest.raises(UsageError, match="--scorer"):
            parse_scorers(bad)
    monkeypatch.setenv("RLK_SCORER_PYTHON", "/engines/python, megatron=/other/python")
    found = parse_pythons(["vllm=/third/python"])
    assert (found["vllm"], found["megatron"]) == ("/third/python", "/other/python")
    assert found["transformers"] == "/engines/python"
    with pytest.raises(UsageError, match="no interpreter"):
        parse_pythons(["vlm=/x"])


def test_an_unknown_scorer_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    got = CliRunner().invoke(command, ["--run-id", "r1", "--ledger", str(tmp_path), "--scorer", "sglang"])
    assert isinstance(got.exception, UsageError)
    assert "choose from vllm, megatron, transformers" in str(got.exception)


@pytest.fixture
def paired(make_run: Make) -> tuple[Any, list[PairedSample]]:
    history = load_history(make_run(groups=8), "r1")
    return history, pair(history).pairs


def test_a_recorded_layout_is_rebuilt_with_the_samples_nobody_chose(paired: tuple[Any, list[PairedSample]]) -> None:
    history, pairs = paired
    layouts = Layouts(history)
    found = layouts.of(pairs[:3], "training")
    assert (found.layout.name, found.reason) == ("together", "no batch layout was recorded for its values")
    step = pairs[0].sample.step
    together = [one for one in pairs if one.sample.step == step][:3]
    score = together[0].training_series.first
    order = [one.sample.sample_id for one in reversed(together)]
    fact = {"layout_id": "l0", "sample_order": order, "padding_side": "left"}
    rebuilt = _laid_out(history, score.writer_id, fact)
    chosen = replace(together[1], training_series=_named(together[1], "l0"))
    found = rebuilt.of([chosen], "training")
    assert (found.layout.name, found.layout.padding) == ("recorded", "left")
    assert [found.samples[index].sample_id for index in found.layout.batches[0]] == order
    assert found.samples[0].sample_id == chosen.sample.sample_id
    packed = _laid_out(history, score.writer_id, fact | {"packing": True})
    assert "packed" in packed.of([chosen], "training").reason
    unknown = _laid_out(history, score.writer_id, fact | {"sample_order": [*order, "nobody"]})
    assert "not recorded whole" in unknown.of([chosen], "training").reason


def _laid_out(history: Any, writer: str, fields: dict[str, Any]) -> Layouts:
    from rlk_ledger.history import Fact

    fact = Fact("batch.layout", writer, 0, fields, {})
    return Layouts(replace(history, facts={**history.facts, "batch.layout": [fact]}))


def _named(pair_: PairedSample, layout: str) -> Any:
    series = pair_.training_series
    return replace(series, scores=[replace(series.first, layout_id=layout)])


@pytest.mark.demo
def test_the_demo_is_had_again_bit_for_bit_in_its_recorded_layouts(tmp_path: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("RLK_", "PYTEST_"))}
    command = [str(Path(sys.executable).with_name("rlk-ledger"))]

    def call(*arguments: str) -> Any:
        done = subprocess.run([*command, *arguments], capture_output=True, text=True, env=environment, timeout=280)
        assert done.returncode == 0, done.stdout + done.stderr
        return json.loads(done.stdout)

    call("demo", "--dir", str(tmp_path), "--steps", "1", "--json")
    scorers = ["--scorer", "transformers", "--scorer", "transformers@rollout"]
    document = call("replay", "demo", "--ledger", str(tmp_path / "ledger"), "--json", *scorers)
    assert document["decision"] == "within_floor"
    live = document["numbers"]["live"]
    for name in ("transformers", "transformers@rollout"):
        one = live["scorers"][name]
        assert one["layout"] == "recorded"
        assert one["reproduction"]["equal"] > 0.99, "the recorded engine and the live one are the same code"
    links = live["chain"]["transformers@rollout"]
    assert links["prefill_over_decode"]["part"]["value"] > 0.5, "what is left is decode against prefill"
