"""A replay end to end: recorded runs whose cause is known, what is recorded, what stops it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from rich.console import Console

from rlk_ledger.audit import audit
from rlk_ledger.history import load_history
from rlk_ledger.ledger import Ledger, open_ledger
from rlk_ledger_replay import run as run_module
from rlk_ledger_replay import screen
from rlk_ledger_replay.preparation import Request
from rlk_ledger_replay.replay_command import replay as command
from rlk_ledger_replay.result import NUMBERS, ReplayResult
from rlk_ledger_replay.run import replay
from rlk_ledger_schemas.errors import LedgerError, StoreError, UsageError

RUN = "r1"
Make = Callable[..., Ledger]
AHEAD = {"rollout": {}, "training": {"v0": "v1", "v1": "v2"}}
STALE = {"rollout": {"v1": "v0"}, "training": {}}


def ids(result: ReplayResult) -> list[str]:
    return [finding.finding_id for finding in result.findings]


def test_two_bf16_engines_that_differ_in_order_alone_pass(make_run: Make) -> None:
    result = replay(make_run(), RUN)
    assert (result.verdict, result.exit_code, result.decision.decision) == ("pass", 0, "within_floor")
    assert ids(result) == ["drift.within_floor"]
    assert all(gate.status == "passed" for gate in result.judgement.gates)
    floors = result.judgement.floors
    assert floors is not None
    assert floors.multiple_rollout is not None
    assert floors.multiple_rollout.value == pytest.approx(1.0, abs=0.25)


def test_a_float32_training_side_is_no_fault_although_all_drift_is_the_rollouts(make_run: Make) -> None:
    result = replay(make_run(compute={"rollout": "bfloat16", "training": "float32"}), RUN)
    assert result.decision.decision == "within_floor"
    shares = result.judgement.shares
    assert shares is not None
    assert shares.rollout is not None
    assert shares.rollout.value == pytest.approx(1.0, abs=0.02)


@pytest.mark.parametrize(("computes", "side"), [(AHEAD, "training"), (STALE, "rollout")])
def test_weights_of_another_version_are_attributed_to_the_side_that_used_them(
    make_run: Make, computes: dict[str, dict[str, str]], side: str
) -> None:
    result = replay(make_run(computes_version=computes), RUN)
    assert (result.verdict, result.exit_code, result.decision.side) == ("fail", 1, side)
    found = {finding.finding_id: finding for finding in result.findings}
    assert found["drift.attributed"].where == {"side": side}
    assert found["drift.attributed"].evidence[f"share_{side}"]["low"] > 0.8


def test_weights_an_engine_held_under_another_name_are_confirmed_as_the_cause(make_run: Make) -> None:
    result = replay(make_run(computes_version=STALE, holds=True), RUN)
    assert (result.exit_code, result.decision.side) == (1, "rollout")
    assert {"weights.not_loaded", "drift.attributed"} <= set(ids(result))
    assert result.decision.reason.endswith("they are the cause.")
    held = {gate.gate: gate for gate in result.judgement.gates}["weights.held.v1"]
    assert (held.status, held.evidence["holds"]) == ("failed", ["v0"])


def test_a_declared_temperature_difference_is_not_comparable_and_confirmed_as_the_cause(make_run: Make) -> None:
    result = replay(make_run(temperature={"rollout": 0.7, "training": 1.0}), RUN)
    assert (result.verdict, result.exit_code) == ("not_comparable", 1)
    assert result.decision.decision == "not_comparable"
    assert "contract.differs" in ids(result)
    residual = result.judgement.residual
    assert residual is not None
    assert residual.decision == "within_floor"
    assert list(result.to_dict()["numbers"]) == list(NUMBERS)


def test_an_undeclared_temperature_difference_is_found_by_its_side(make_run: Make) -> None:
    told = {"rollout": 0.7, "training": 0.7}
    result = replay(make_run(temperature={"rollout": 0.7, "training": 1.0}, declared_temperature=told), RUN)
    assert result.exit_code == 1
    assert result.decision.side == "training"


@pytest.mark.parametrize("side", ["rollout", "training"])
def test_values_one_token_late_are_named_by_side_and_lag(make_run: Make, side: str) -> None:
    result = replay(make_run(shift={"rollout": 0, "training": 0, side: 1}), RUN)
    assert result.exit_code == 1
    shifts = [finding.where for finding in result.findings if finding.finding_id == "alignment.shift"]
    assert len(shifts) == 1
    assert (shifts[0]["side"], shifts[0]["lag"]) == (side, 1)
    assert "drift.attributed" not in ids(result)


def test_equal_bits_without_determinism_evidence_are_inconclusive(make_run: Make) -> None:
    result = replay(make_run(copy=True), RUN)
    assert (result.verdict, result.exit_code, result.decision.decision) == ("inconclusive", 3, "drift_zero")
    assert ids(result).count("drift.zero") == 1


def test_equality_of_most_tokens_does_not_hide_a_few_wild_ones(make_run: Make) -> None:
    result = replay(make_run(copy=True, wild=8), RUN)
    assert result.judgement.arms[0].drift.values["mismatch_fraction"] < 0.01
    assert result.decision.decision != "drift_zero"
    assert result.exit_code != 0


def test_a_digest_that_cannot_be_recomputed_leaves_a_gap_and_no_pass(make_run: Make) -> None:
    result = replay(make_run(publish_digest="sha256:" + "0" * 64), RUN)
    assert result.decision.decision == "within_floor"
    assert (result.verdict, result.exit_code) == ("inconclusive", 3)
    gaps = {finding.where["gate"] for finding in result.findings if finding.finding_id == "evidence.incomplete"}
    assert gaps == {"weights.digest.v0", "weights.digest.v1"}


def test_without_declared_dtypes_there_is_no_floor_and_no_pass(make_run: Make) -> None:
    result = replay(make_run(attention=None), RUN)
    assert (result.verdict, result.exit_code) == ("inconclusive", 3)
    assert "could not be measured" in result.decision.reason
    assert result.numbers()["floor_drift"] is None


def test_nothing_is_computed_on_weights_that_are_not_the_recorded_ones(
    make_run: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object, **__: object) -> None:
        raise AssertionError("a number was computed")

    ledger = make_run(publish_digest="sum64x2:" + "0" * 32)
    monkeypatch.setattr(run_module, "score", never)
    result = replay(ledger, RUN)
    assert (result.verdict, result.exit_code) == ("inconclusive", 3)
    assert [finding.finding_id for finding in result.findings] == ["replay.failed"]
    assert "is not the recorded one" in result.decision.reason
    assert [arm.arm for arm in result.judgement.arms] == ["both_native"]


def test_weights_that_are_gone_say_where_they_should_be(make_run: Make, tmp_path: Path) -> None:
    result = replay(make_run(), RUN, request=Request(weights=str(tmp_path / "gone" / "{version}")))
    assert result.verdict == "inconclusive"
    assert "gone/v0" in result.decision.reason
    assert "--weights" in result.decision.reason


def test_a_weights_template_without_a_version_is_refused(make_run: Make) -> None:
    with pytest.raises(UsageError, match=r"put \{version\} into it"):
        replay(make_run(), RUN, request=Request(weights="/somewhere"))


def test_weights_found_by_template_give_the_same_numbers(make_run: Make, weights: Path) -> None:
    ledger = make_run()
    recorded = replay(ledger, RUN, keep=False)
    template = replay(ledger, RUN, request=Request(weights=str(weights / "{version}")), keep=False)
    assert template.numbers() == recorded.numbers()


def test_a_reference_whose_paths_disagree_is_believed_in_nothing(
    make_run: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = run_module.score

    def crooked(*args: object, **kwargs: object) -> object:
        scores = honest(*args, **kwargs)  # type: ignore[arg-type]
        scores.values["rollout.decode"][5] = np.nextafter(scores.values["rollout.decode"][5], np.float32(0))
        return scores

    monkeypatch.setattr(run_module, "score", crooked)
    result = replay(make_run(computes_version=AHEAD), RUN)
    assert (result.exit_code, result.decision.decision) == (1, "reference_itself_is_broken")
    assert "reference.broken" in ids(result)
    assert "drift.attributed" not in ids(result)


def test_an_error_inside_the_scorer_is_reported_as_itself(make_run: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> object:
        raise RuntimeError("out of memory on device 0")

    monkeypatch.setattr(run_module, "score", broken)
    ledger = make_run()
    result = replay(ledger, RUN)
    assert result.exit_code == 3
    assert "out of memory on device 0" in result.decision.reason
    cases = {e["arm"]: e for _, _, e, _ in open_ledger(ledger.url).read_events(RUN, ["case.attempted"])}
    assert cases["both_reference"]["status"] == "error"
    assert cases["both_native"]["status"] == "completed"


def test_top_p_below_one_is_a_variant_the_reference_cannot_apply(make_run: Make) -> None:
    result = replay(make_run(contract={"top_p": 0.8}), RUN)
    assert (result.exit_code, result.decision.decision) == (3, "variant_did_not_apply")
    assert "top_p=0.8" in result.decision.reason


def test_samples_chosen_by_their_drift_convict_nobody(make_run: Make) -> None:
    result = replay(make_run(computes_version=AHEAD), RUN, request=Request(samples=8, method="worst"))
    assert result.decision.decision == "insufficient_evidence"
    assert result.decision.side is None


def test_a_condition_narrows_the_samples_and_one_that_nothing_meets_is_refused(make_run: Make) -> None:
    ledger = make_run()
    result = replay(ledger, RUN, where="step = 1", keep=False)
    assert {pair.sample.step for pair in result.prepared.selection.pairs} == {1}
    with pytest.raises(UsageError, match="satisfies --where 'step = 7'"):
        replay(ledger, RUN, where="step = 7", keep=False)


def test_one_seed_gives_one_answer(make_run: Make) -> None:
    ledger = make_run(computes_version=AHEAD)
    first, second = (replay(ledger, RUN, request=Request(samples=8, seed=3), keep=False) for _ in range(2))
    assert first.numbers() == second.numbers()
    assert first.replay_id != second.replay_id


def test_a_run_whose_bytes_were_changed_is_not_replayed(make_run: Make) -> None:
    ledger = make_run()
    segment = next(Path(ledger.url).rglob("*.parquet"))
    data = bytearray(segment.read_bytes())
    data[len(data) // 2] ^= 1
    segment.write_bytes(data)
    with pytest.raises(LedgerError, match="does not verify"):
        replay(open_ledger(ledger.url), RUN)


def test_a_run_that_is_not_there_is_named(make_run: Make) -> None:
    with pytest.raises(LedgerError, match="no run 'r9'"):
        replay(make_run(), "r9")


def test_everything_is_recorded_and_a_second_audit_sees_the_same_run(make_run: Make) -> None:
    ledger = make_run()
    before = audit(load_history(ledger, RUN))
    result = replay(ledger, RUN, request=Request(samples=6))
    again = open_ledger(ledger.url)
    events = [(fields, arrays) for _, _, fields, arrays in again.read_events(RUN)]
    by_type: dict[str, list] = {}
    for fields, arrays in events:
        by_type.setdefault(fields["type"], []).append((fields, arrays))
    assert by_type["replay.planned"][0][0]["replay_id"] == result.replay_id
    assert {f["arm"] for f, _ in by_type["arm.scored"]} == {f["arm"] for f, _ in by_type["case.attempted"]}
    assert {f["gate"] for f, _ in by_type["gate.checked"]} >= {"reference.self_check", "weights.digest.v0"}
    assert [f["finding_id"] for f, _ in by_type["finding.raised"]] == ["drift.within_floor"]
    decided = {f["operator"]: f for f, _ in by_type["operator.decided"] if f["side"] == "reference"}
    assert decided.keys() >= {"embedding", "rms_norm", "linear", "rope", "attention", "swiglu"}
    assert {f["labels"]["replay_id"] for f in decided.values()} == {result.replay_id}
    assert all(f["callables"] and f["build"] and f["source"] and not f["fallback"] for f in decided.values())
    assert decided["linear"]["mode"] == {"fast": "auto", "consistency": "strict"}
    verdict = by_type["verdict.reached"][0][0]
    assert (verdict["verdict"], verdict["exit_code"]) == ("pass", 0)
    assert verdict["evidence"]["multiple_drift"] == result.numbers()["multiple_drift"]
    assert verdict["evidence"]["tolerance_fingerprint"].startswith("sha256:")
    scored = [(f, a) for f, a in by_type["logprobs"] if f["source"] == "replay:reference-training"]
    assert len(scored) == 6
    assert result.scores is not None
    assert result.prepared.tokens is not None
    pair = next(p for p in result.prepared.selection.pairs if p.sample.sample_id == scored[0][0]["sample_id"])
    index = result.prepared.selection.pairs.index(pair)
    kept = result.scores.values["training.prefill"][result.prepared.tokens.pair_N == index]
    values = np.frombuffer(scored[0][1]["values"].data, "<f4")
    assert np.array_equal(values[np.isfinite(values)], kept)
    assert audit(load_history(again, RUN)).to_dict() == before.to_dict()


def test_a_bucket_that_refuses_costs_the_record_and_not_the_answer(
    make_run: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = make_run()

    def refuse(*_: object, **__: object) -> None:
        raise StoreError("read-only bucket")

    monkeypatch.setattr(ledger, "writer", refuse)
    result = replay(ledger, RUN, request=Request(samples=4))
    assert result.verdict == "pass"
    assert result.not_recorded == "read-only bucket"


def test_only_the_native_arm_needs_no_model(make_run: Make, tmp_path: Path) -> None:
    result = replay(make_run(), RUN, arms=("both_native",), keep=False)
    assert [arm.arm for arm in result.judgement.arms] == ["both_native"]
    assert (result.scores, result.exit_code) == (None, 3)


def test_the_chain_links_add_up_to_the_drift(make_run: Make) -> None:
    links = replay(make_run(computes_version=AHEAD), RUN, keep=False).judgement.links
    parts = ("training_over_prefill", "prefill_over_decode", "decode_over_rollout")
    assert sum(links[name]["mean"] for name in parts) == pytest.approx(links["training_over_rollout"]["mean"])
    assert links["prefill_over_decode"]["max"] == 0.0


def test_the_command_prints_one_json_document_and_exits_by_the_findings(make_run: Make) -> None:
    ledger = make_run(computes_version=AHEAD)
    got = CliRunner().invoke(command, ["--run-id", RUN, "--ledger", ledger.url, "--samples", "12", "--json"])
    document = json.loads(got.stdout)
    assert got.exit_code == document["exit_code"] == 1
    assert (document["run_id"], document["verdict"], document["side"]) == (RUN, "fail", "training")
    keys = {"finding_id", "severity", "where", "evidence", "next_step"}
    assert all(set(finding) == keys for finding in document["findings"])
    assert document["arms"]["both_reference"]["metrics"]["mismatch_count"] == 0


@pytest.mark.parametrize("width", [40, 100])
def test_the_screen_says_the_verdict_first_on_any_width_and_without_colour_codes(make_run: Make, width: int) -> None:
    result = replay(make_run(), RUN, request=Request(samples=6), keep=False)
    console = Console(width=width, record=True, highlight=False, file=None, force_terminal=False)
    with console.capture() as captured:
        screen.show(result, "ledger", console)
    text = captured.get()
    assert text.startswith("PASS")
    assert "\x1b" not in text
    assert max(map(len, text.splitlines())) <= width
    for word in ("rollout", "training", "both_native", "Next:", "floor"):
        assert word in text


def test_without_a_ledger_the_command_says_so() -> None:
    got = CliRunner(env={"RLK_LEDGER": ""}).invoke(command, ["--run-id", RUN])
    assert got.exit_code == 2
    assert "--ledger" in got.output


def test_an_unknown_arm_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    got = CliRunner().invoke(command, ["--run-id", RUN, "--ledger", str(tmp_path), "--arms", "both_nativ"])
    assert isinstance(got.exception, UsageError)
    assert "both_native" in str(got.exception)


@pytest.mark.parametrize("names", [[], ["one", "--run-id", "another"]])
def test_the_command_wants_one_run_by_either_name(names: list[str]) -> None:
    got = CliRunner().invoke(command, [*names, "--ledger", "nowhere"])
    assert got.exit_code == 2
    assert "which run?" in got.output


@pytest.mark.parametrize("names", [["one"], ["--run-id", "one"], ["one", "--run-id", "one"]])
def test_a_run_is_named_by_position_or_by_option(names: list[str], tmp_path: Path) -> None:
    got = CliRunner().invoke(command, [*names, "--ledger", str(tmp_path)])
    assert "no ledger at" in str(got.exception)
