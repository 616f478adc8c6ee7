"""The parts of a replay on their own: semantics, weights, selection, scores, gates, verdicts."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from rlk_ledger.audit.finding import AuditResult, Finding
from rlk_ledger.history import load_history
from rlk_ledger.ledger import Ledger
from rlk_ledger.pairs import PairedSample, pair
from rlk_ledger_kernels.registry import Decision as OperatorDecision
from rlk_ledger_replay import gates
from rlk_ledger_replay.arms import References, arm_counts, score_arms
from rlk_ledger_replay.checkpoint import CheckpointError
from rlk_ledger_replay.decision import Decision
from rlk_ledger_replay.numerics import Numerics
from rlk_ledger_replay.scores import Pass, Tokens, compared_tokens, score, scorings, why_unscorable
from rlk_ledger_replay.selection import group_key, select
from rlk_ledger_replay.semantics import declared, dtype_name
from rlk_ledger_replay.verdict import combine
from rlk_ledger_replay.weights import Recorded, find_folder, hold, recorded_versions
from rlk_ledger_schemas.errors import LedgerError, UsageError
from rlk_ledger_schemas.findings import exit_code
from rlk_ledger_schemas.fingerprints import file_digest, tensors_digest

RUN = "r1"
LOGPROB = {"mode": "processed", "temperature": 0.7, "head_dtype": "float32", "logits_dtype": "float32"}
BF16 = [("attention", {"output_dtype": "bfloat16"})]


@pytest.mark.parametrize(
    ("written", "name"),
    [("bf16", "bfloat16"), ("torch.float32", "float32"), ("FP16", "float16"), ("int8", None), (None, None)],
)
def test_dtypes_are_read_in_their_usual_spellings_and_never_guessed(written: str | None, name: str | None) -> None:
    assert dtype_name(written) == name


def test_the_reference_keeps_semantics_and_the_imitation_keeps_dtypes_too() -> None:
    side = declared("rollout", {**LOGPROB, "head_dtype": "bf16", "logits_dtype": "bf16"}, BF16)
    assert side.reference == Numerics(temperature=0.7)
    assert side.imitation == Numerics(compute="bfloat16", lm_head="bfloat16", logits="bfloat16", temperature=0.7)
    assert (side.undeclared, side.unsupported) == ((), ())


def test_a_head_that_is_not_declared_follows_the_compute_dtype() -> None:
    side = declared("rollout", {"mode": "raw", "compute_dtype": "bfloat16"})
    assert side.imitation is not None
    assert (side.imitation.lm_head, side.imitation.logits) == ("bfloat16", "bfloat16")
    assert side.reference.logprob_mode == "raw"
    float32_head = declared("rollout", {"mode": "raw", "compute_dtype": "bfloat16", "head_dtype": "float32"})
    assert float32_head.imitation is not None
    assert (float32_head.imitation.lm_head, float32_head.imitation.logits) == ("float32", "float32")


def test_a_setting_read_back_from_the_engine_stands_in_for_a_contract_and_is_named() -> None:
    side = declared("training", LOGPROB, knobs={"model.dtype": "torch.bfloat16"})
    assert side.imitation is not None
    assert side.imitation.compute == "bfloat16"
    assert "model.dtype" in side.assumed["compute_dtype"]


def test_an_undeclared_compute_dtype_leaves_no_imitation() -> None:
    side = declared("training", LOGPROB)
    assert side.imitation is None
    assert side.undeclared == ("compute_dtype",)


def test_a_temperature_left_out_is_taken_from_the_sample_and_said_to_be() -> None:
    side = declared("rollout", {"mode": "processed"}, BF16, sampling={"temperature": 0.3})
    assert side.reference.temperature == 0.3
    assert "sample" in side.assumed["temperature"]


@pytest.mark.parametrize(
    ("field", "value"),
    [("top_p", 0.8), ("top_k", 20), ("min_p", 0.1), ("temperature", 0.0), ("mode", "scaled"), ("alignment", "shifted")],
)
def test_what_the_decoder_cannot_compute_is_listed_by_field_and_value(field: str, value: object) -> None:
    side = declared("rollout", {**LOGPROB, field: value}, BF16)
    assert side.unsupported == (f"{field}={value!r}",)


@pytest.mark.parametrize(("field", "value"), [("top_p", 1), ("top_k", -1), ("min_p", 0.0), ("penalties", {})])
def test_neutral_sampling_needs_nothing(field: str, value: object) -> None:
    assert declared("rollout", {**LOGPROB, field: value}, BF16).unsupported == ()


def test_published_weights_come_before_loaded_ones() -> None:
    loaded = {"type": "weights.loaded", "weight_version": "v1", "digest": "sum64x2:1", "path": "there"}
    published = {"type": "weights.published", "weight_version": "v1", "digest": "sum64x2:2", "file_digest": "blake3:3"}
    wanted = Recorded("v1", "sum64x2:2", "blake3:3", "there")
    assert recorded_versions([loaded, published]) == {"v1": wanted}
    assert recorded_versions([published, loaded]) == {"v1": wanted}


def test_recorded_paths_start_at_the_ledger_or_beside_it(tmp_path: Path) -> None:
    ledger = tmp_path / "ledger"
    inside, beside = ledger / "w" / "v0", tmp_path / "w" / "v1"
    for folder in (inside, beside):
        folder.mkdir(parents=True)
    (beside / "model.safetensors").touch()
    assert find_folder(Recorded("v0", path="w/v0"), str(ledger)) == inside
    assert find_folder(Recorded("v1", path="w/v1"), ledger.as_uri()) == beside
    assert find_folder(Recorded("v1", path="w/v1/model.safetensors"), str(ledger)) == beside
    assert find_folder(Recorded("v1", path=beside.as_uri()), str(ledger)) == beside
    assert find_folder(Recorded("v1", path="elsewhere"), str(ledger), str(tmp_path / "w" / "{version}")) == beside
    with pytest.raises(LedgerError, match="names no path; pass --weights"):
        find_folder(Recorded("v0"), str(ledger))
    with pytest.raises(LedgerError, match="'v9' are not at"):
        find_folder(Recorded("v9", path="w/v9"), str(ledger))
    with pytest.raises(UsageError, match="one folder for all versions"):
        find_folder(Recorded("v0"), str(ledger), "w/v0")


def test_a_checkpoint_is_accepted_by_each_scheme_of_digest_and_by_no_other(weights: Path) -> None:
    folder = weights / "v0"
    file = folder / "model.safetensors"
    live = hold(Recorded("v0"), folder)
    assert live.status == "unknown"
    raw = {name: t.contiguous().view(-1).view(torch.uint8) for name, t in load_file(file).items()}
    by_tensor = tensors_digest((name, t.numpy().tobytes()) for name, t in raw.items())[0]
    assert hold(Recorded("v0", live.digest), folder).status == "passed"
    assert hold(Recorded("v0", by_tensor), folder).status == "passed"
    assert hold(Recorded("v0", "sha256:00", file_digest(file)), folder).status == "passed"
    assert hold(Recorded("v0", "sha256:00"), folder).status == "unknown"
    assert hold(Recorded("v0", "sha256:00", "blake3:00"), folder).status == "failed"
    assert hold(Recorded("v0", live.digest), weights / "v1").status == "failed"


def test_one_flipped_bit_of_a_checkpoint_is_seen(weights: Path, tmp_path: Path) -> None:
    folder = tmp_path / "v0"
    shutil.copytree(weights / "v0", folder)
    wanted = hold(Recorded("v0"), folder).digest
    data = bytearray((folder / "model.safetensors").read_bytes())
    data[-1000] ^= 1
    (folder / "model.safetensors").write_bytes(data)
    assert hold(Recorded("v0", wanted), folder).status == "failed"


def test_a_folder_that_is_no_checkpoint_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="pass a model folder"):
        hold(Recorded("v0"), tmp_path)


@pytest.fixture
def paired(make_run: Callable[..., Ledger]) -> list[PairedSample]:
    return pair(load_history(make_run(), RUN)).pairs


def test_selection_takes_every_group_once_before_any_twice(paired: list[PairedSample]) -> None:
    chosen = select(paired, 10, seed=1)
    assert len({group_key(one) for one in chosen.pairs}) == len(chosen.pairs) == 10
    assert [one.sample.step for one in chosen.pairs].count(0) == 5
    assert not chosen.biased


def test_selection_depends_on_the_seed_alone(paired: list[PairedSample]) -> None:
    picks = [[one.sample.sample_id for one in select(paired, 6, seed).pairs] for seed in (0, 0, 1)]
    assert picks[0] == picks[1] != picks[2]


def test_the_worst_samples_are_a_biased_choice_unless_they_are_all(paired: list[PairedSample]) -> None:
    worst = select(paired, 3, method="worst")
    assert worst.biased
    size = {one.sample.sample_id: np.abs(one.training - one.rollout).astype(np.float64) for one in paired}
    rms = {name: float(np.sqrt((d**2).mean())) for name, d in size.items()}
    assert {one.sample.sample_id for one in worst.pairs} == set(sorted(rms, key=rms.__getitem__)[-3:])
    assert not select(paired, 99, method="worst").biased


def test_samples_without_a_group_are_their_own_cluster(paired: list[PairedSample]) -> None:
    for one in paired[:2]:
        one.sample.group_id = None
    assert group_key(paired[0]) != group_key(paired[1])


def test_equal_scorings_run_once_and_serve_every_pass(paired: list[PairedSample], weights: Path) -> None:
    pairs = paired[:4]
    tokens = compared_tokens(pairs)
    numerics = (Numerics(temperature=0.7),) * len(pairs)
    passes = [Pass("a", numerics, "prefill"), Pass("b", numerics, "prefill"), Pass("c", numerics, "decode")]
    done: list[int] = []
    folders = {0: weights / "v0", 1: weights / "v1"}
    scores = score(pairs, tokens, passes, folders, advance=done.append)
    assert sum(done) == scorings(tokens, passes) == 2 * len(pairs)
    assert np.array_equal(scores.values["a"], scores.values["b"])
    assert np.array_equal(scores.values["a"], scores.values["c"])
    assert scores.unchanged == {0: True, 1: True}


def test_a_sample_with_two_weight_versions_is_scored_by_position(paired: list[PairedSample], weights: Path) -> None:
    one = paired[0]
    folders = {0: weights / "v0", 1: weights / "v1"}
    passes = [Pass("ref", (Numerics(temperature=0.7),), "prefill")]
    whole = {}
    for version in (0, 1):
        whole[version] = score(
            [replace(one, version=np.full_like(one.version, version))],
            compared_tokens([replace(one, version=np.full_like(one.version, version))]),
            passes,
            folders,
        ).values["ref"]
    mixed = one.version.copy()
    mixed[20:] = 1
    split = replace(one, version=mixed)
    got = score([split], compared_tokens([split]), passes, folders).values["ref"]
    assert np.array_equal(got, np.concatenate([whole[0][:20], whole[1][20:]]))
    assert not np.array_equal(whole[0], whole[1])


def test_what_cannot_be_scored_says_why(paired: list[PairedSample]) -> None:
    one = paired[0]
    assert why_unscorable(one, 512, 272) is None
    assert "longer than the model's 20 positions" in str(why_unscorable(one, 20, 272))
    assert "vocabulary of 50" in str(why_unscorable(one, 512, 50))
    unknown = replace(one, version=np.full_like(one.version, -1))
    assert "no weight version" in str(why_unscorable(unknown, 512, 272))
    one.sample.position_ids = np.array([0, 2] * 24, dtype=np.int32)
    assert "not consecutive" in str(why_unscorable(one, 512, 272))
    one.sample.prompt_token_ids = None
    assert "prompt was not recorded" in str(why_unscorable(one, 512, 272))
    paired[1].sample.response_token_ids = paired[1].sample.response_token_ids.astype(np.uint64)
    assert "redacted" in str(why_unscorable(paired[1], 512, 272))


def test_raw_and_processed_at_temperature_one_are_comparable(paired: list[PairedSample]) -> None:
    left, right = {"mode": "raw"}, {"mode": "processed", "temperature": 1.0}
    pairs = [replace(one, rollout_contract=left, training_contract=right) for one in paired]
    assert [gate.status for gate in gates.comparability(pairs)] == ["passed"]
    right["temperature"] = 0.9
    failed = gates.comparability(pairs)
    assert [(gate.gate, gate.status) for gate in failed] == [("comparable.mode", "failed")]
    assert failed[0].evidence["samples"] == len(pairs)


def test_numeric_and_path_differences_do_not_make_sides_incomparable(paired: list[PairedSample]) -> None:
    left = {**LOGPROB, "execution_path": "decode"}
    right = {**LOGPROB, "execution_path": "full_prefill", "head_dtype": "bfloat16"}
    pairs = [replace(one, rollout_contract=left, training_contract=right) for one in paired]
    assert [gate.status for gate in gates.comparability(pairs)] == ["passed"]


def test_a_backend_that_is_not_the_requested_one_fails_its_gate() -> None:
    ran = OperatorDecision("linear", "torch", "torch", "m", "requested by name")
    swapped = OperatorDecision("linear", "fast", "torch", "m", "not available")
    assert gates.applied([ran])[0].status == "passed"
    assert gates.applied([ran, swapped])[0].status == "failed"
    stands_in = OperatorDecision("linear", "auto", "reference", "m", "stands in", fallback=True)
    assert gates.applied([ran, stands_in])[0].status == "failed"
    assert gates.applied([])[0].status == "unknown"


def flat(n: int) -> Tokens:
    index = np.arange(n)
    zeros = np.zeros(n, dtype=np.float32)
    return Tokens(np.zeros(n, dtype=np.int64), index, index * 0, index * 0, zeros, zeros)


@given(lag=st.sampled_from([-2, -1, 0, 1, 2]), seed=st.integers(0, 1000))
def test_a_shift_is_found_with_its_sign(lag: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    reference = -rng.exponential(1.0, 200).astype(np.float32)
    recorded = np.roll(reference, -lag) + 0.001 * rng.normal(size=200).astype(np.float32)
    gate = gates.alignment("training", recorded, reference, flat(200))
    assert gate.status == ("passed" if lag == 0 else "failed")
    assert gate.evidence.get("lag", 0) == lag


def test_a_shift_is_looked_for_between_neighbours_of_one_sample_only() -> None:
    """Responses of two tokens with a masked one between them have no neighbours: nothing can be shifted."""
    rng = np.random.default_rng(1)
    reference = -rng.exponential(1.0, 400).astype(np.float32)
    recorded = np.roll(reference, -1)
    pair_N, position_N = np.arange(400) // 2, np.tile([0, 9], 200)
    alone = Tokens(pair_N, position_N, pair_N * 0, pair_N, recorded, recorded)
    assert gates.alignment("rollout", recorded, reference, alone).status == "passed"
    ends = Tokens(np.arange(400), np.arange(400), pair_N * 0, pair_N, recorded, recorded)
    assert gates.alignment("rollout", recorded, reference, ends).status == "passed"


def test_nothing_scored_is_not_measured_unchanged() -> None:
    assert gates.read_only({}, []).status == "unknown"
    assert gates.read_only({0: True}, ["v0"]).status == "passed"
    assert gates.read_only({0: True, 1: False}, ["v0", "v1"]).status == "failed"


def test_arms_count_tokens_clipped_on_either_side_and_their_groups() -> None:
    rollout = np.full(6, -2.0, np.float32)
    training = rollout + np.array([0.5, -0.5, 0.0, 0.5, 0.1, -0.2], np.float32)
    group = np.array([0, 1, 1, 2, 3, 3])
    tokens = Tokens(np.arange(6), np.zeros(6, np.int64), group * 0, group, rollout, training)
    arms = score_arms(tokens, References(rollout, training, training))
    counts = arm_counts(arms, tokens)
    assert counts is not None
    assert (counts.clipped, counts.groups) == (3, 3)
    assert (counts.both_native, counts.training_reference_only) == (0.5, 0.0)
    assert arm_counts(arms[:2], tokens) is None


def test_noise_is_no_shift() -> None:
    rng = np.random.default_rng(0)
    reference = -rng.exponential(1.0, 500).astype(np.float32)
    recorded = (reference + rng.normal(size=500)).astype(np.float32)
    assert gates.alignment("rollout", recorded, reference, flat(500)).status == "passed"


def test_one_differing_bit_breaks_the_self_check() -> None:
    values = np.linspace(-3, -1, 50, dtype=np.float32)
    other = values.copy()
    assert gates.self_check(values, other).status == "passed"
    other[7] = np.nextafter(other[7], np.float32(0))
    gate = gates.self_check(values, other)
    assert (gate.status, gate.evidence["first"]) == ("failed", 7)
    signed = np.zeros(3, dtype=np.float32)
    assert gates.self_check(signed, -signed).status == "failed"
    assert gates.self_check(values * np.float32("nan"), values * np.float32("nan")).status == "failed"


def audited(*ids: str, verdict: str = "pass") -> AuditResult:
    findings = tuple(Finding(name, {}, {}) for name in ids)
    code = exit_code(one.severity for one in findings)
    return AuditResult(RUN, findings, verdict, int(code), "", "")  # type: ignore[arg-type]


PASS = Decision("within_floor", "pass", "")
FAIL = Decision("caused_by_training_side", "fail", "", "training")


@pytest.mark.parametrize(
    ("audit", "finding", "decision", "verdict", "code"),
    [
        (audited(), "drift.within_floor", PASS, "pass", 0),
        (audited(), "drift.attributed", FAIL, "fail", 1),
        (audited("coverage.unobserved", verdict="inconclusive"), "drift.within_floor", PASS, "inconclusive", 3),
        (audited("contract.differs", verdict="not_comparable"), "drift.within_floor", PASS, "not_comparable", 1),
        (audited("weights.not_loaded", verdict="fail"), "drift.attributed", FAIL, "fail", 1),
        (audited(), "noise.clip_below_floor", PASS, "fail", 1),
        (audited(), "evidence.incomplete", PASS, "inconclusive", 3),
        (audited("drift.zero", verdict="inconclusive"), "drift.within_floor", PASS, "inconclusive", 3),
    ],
)
def test_a_replay_never_clears_what_the_record_shows(
    audit: AuditResult, finding: str, decision: Decision, verdict: str, code: int
) -> None:
    findings, got, exit_ = combine(audit, [Finding(finding, {}, {})], decision)
    assert (got, exit_) == (verdict, code)
    assert len(findings) == len(audit.findings) + 1


def test_a_finding_both_raise_is_kept_once() -> None:
    audit = AuditResult(RUN, (Finding("alignment.shift", {"side": "rollout", "lag": 1}, {}),), "fail", 1, "", "")
    again = Finding("alignment.shift", {"side": "rollout", "lag": 1}, {"reason": "x"})
    other = Finding("alignment.shift", {"side": "training", "lag": 1}, {})
    findings, _, _ = combine(audit, [again, other], FAIL)
    assert [one.where["side"] for one in findings] == ["rollout", "training"]
