"""Every shipped dump imports as what the engines computed, bit for bit, into a run that verifies and audits."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlk_ledger.classes import MISSING
from rlk_ledger.history import Score
from rlk_ledger.importers import FORMATS
from rlk_ledger.ledger import open_ledger
from rlk_ledger.verify import verify

CASES = {
    "slime": ("slime", True, True),
    "slime-gather-order": ("slime", True, True),
    "vime": ("vime", False, True),
    "miles": ("miles", True, True),
    "prime-rl": ("prime-rl", True, False),
    "nemo-rl": ("nemo-rl", True, False),
}
"""Folder -> (format, whether it has training values, whether it has groups and weight versions)."""

LOST = {("prime-rl", 1, 3)}
"""(folder, sample, position) of the one value the dumps hold as null."""


def bits(values: Any) -> list[int]:
    return np.asarray(values, np.float32).view(np.uint32).tolist()


@pytest.mark.parametrize("folder", CASES)
def test_both_sides_are_the_engines_values_bit_for_bit(
    folder: str, data: Path, truth: list[dict[str, Any]], imports: Any
) -> None:
    form, trained, grouped = CASES[folder]
    run = imports(form, data / folder)["run_id"]
    history = imports.history(run)
    samples = sorted(history.samples, key=lambda sample: sample.sample_id)
    assert len(samples) == len(truth) == 8
    for sample, real in zip(samples, truth, strict=True):
        assert sample.prompt_token_ids is not None
        assert sample.prompt_token_ids.tolist() == real["prompt_token_ids"]
        assert sample.response_token_ids.tolist() == real["response_token_ids"]
        assert sample.loss_mask.tolist() == real["loss_mask"]
        assert sample.step == 3
        scores = {s.source: s for s in history.scores if s.sample_id == sample.sample_id}
        assert set(scores) == ({"rollout", "training"} if trained else {"rollout"})
        check_rollout(scores["rollout"], real, folder)
        if trained:
            assert bits(scores["training"].values) == bits(real["training"])
        assert (sample.group_id is not None) == grouped
        assert bool(sample.weight_spans) == grouped


def check_rollout(score: Score, real: dict[str, Any], folder: str) -> None:
    """The values are real, except where the format lost them, which is said."""
    classes = np.zeros(len(score.values), np.uint8) if score.value_class is None else score.value_class
    for i, (got, wanted, active) in enumerate(zip(score.values, real["rollout"], real["loss_mask"], strict=True)):
        if (folder, real["index"], i) in LOST:
            assert classes[i] == MISSING
            assert np.isnan(got)
        elif not active and got == 0.0:
            assert classes[i] == MISSING
        else:
            assert classes[i] == 0
            assert bits([got]) == bits([wanted])


def test_tool_tokens_of_a_slime_dump_are_missing_and_nothing_else_is(data: Path, imports: Any) -> None:
    history = imports.history(imports("slime", data / "slime")["run_id"])
    masked = {s.sample_id: s.loss_mask == 0 for s in history.samples}
    for score in history.scores:
        classes = np.zeros(len(score.values), np.uint8) if score.value_class is None else score.value_class
        expected = masked[score.sample_id] if score.source == "rollout" else np.zeros_like(masked[score.sample_id])
        assert ((classes == MISSING) == expected).all()
    assert sum(mask.sum() for mask in masked.values()) == 12


@pytest.mark.parametrize("folder", CASES)
def test_an_imported_run_verifies_deep(folder: str, data: Path, imports: Any) -> None:
    imports(CASES[folder][0], data / folder)
    result = verify(imports.url, deep=True)
    assert (result.verdict, int(result.exit_code), list(result.findings)) == ("intact", 0, [])


NOT_VERSIONED = ("evidence.incomplete", "weight_version")
EXPECTED = {
    "slime": {NOT_VERSIONED},
    "slime-gather-order": {NOT_VERSIONED},
    "vime": {("coverage.unobserved", "training")},
    "miles": {NOT_VERSIONED},
    "prime-rl": {NOT_VERSIONED, ("values.missing", "rollout")},
    "nemo-rl": {NOT_VERSIONED},
}


@pytest.mark.parametrize("folder", CASES)
def test_the_audit_of_a_clean_dump_names_what_the_format_lacks_and_nothing_else(
    folder: str, data: Path, imports: Any
) -> None:
    result = imports.audit(imports(CASES[folder][0], data / folder)["run_id"])
    named = {(f.finding_id, f.where.get("field") or f.where.get("source")) for f in result.findings}
    assert named == EXPECTED[folder]
    assert (result.verdict, result.exit_code) == ("inconclusive", 3)


@pytest.mark.parametrize("folder", [folder for folder, case in CASES.items() if case[1]])
def test_drift_of_every_format_is_the_drift_of_the_truth(
    folder: str, data: Path, truth: list[dict[str, Any]], imports: Any
) -> None:
    run = imports(CASES[folder][0], data / folder)["run_id"]
    deltas = [
        np.float64(t) - np.float64(r)
        for real in truth
        for i, (r, t) in enumerate(zip(real["rollout"], real["training"], strict=True))
        if real["loss_mask"][i] and (folder, real["index"], i) not in LOST
    ]
    metrics = imports.audit(run).summary["drift"]["metrics"]
    assert metrics["abs_dlogp_mean"] == pytest.approx(np.abs(deltas).mean(), rel=1e-12)
    assert metrics["abs_dlogp_max"] == np.abs(deltas).max()
    sql = open_ledger(imports.url).sql(
        "select count(*) n, avg(abs_dlogp) m from drift where run_id = $run", {"run": run}
    )
    row = sql.arrow().to_pylist()[0]
    assert (row["n"], row["m"]) == (len(deltas), pytest.approx(np.abs(deltas).mean(), rel=1e-6))


def test_stated_weight_versions_are_defaulted_and_never_measured(data: Path, imports: Any) -> None:
    run = imports("slime", data / "slime", "--declare", "training.weight_version={step}")["run_id"]
    result = imports.audit(run)
    assert [(f.finding_id, f.where["field"], f.where["source"]) for f in result.findings] == [
        ("metadata.defaulted", "weight_version", "training")
    ]
    history = imports.history(run)
    assert {s.weight_version for s in history.scores} == {"3"}
    assert {s.metadata_source["weight_version"] for s in history.scores if s.source == "rollout"} == {"derived"}


def test_every_field_says_where_it_comes_from(data: Path, imports: Any) -> None:
    history = imports.history(imports("slime", data / "slime")["run_id"])
    by_id = {s.sample_id: s for s in history.samples}
    assert by_id["3-0"].metadata_source["loss_mask"] == "derived"
    assert by_id["3-2"].metadata_source["loss_mask"] == "measured"
    assert by_id["3-0"].metadata_source["weight_spans"] == "derived"
    assert by_id["3-0"].metadata_source["sampling"] == by_id["3-0"].metadata_source["engine"] == "absent"
    assert by_id["3-0"].weight_spans == (("3", 0, 40),)
    assert by_id["3-0"].cache == {"cached_tokens": 0}
    training = next(s for s in history.scores if s.source == "training")
    assert training.metadata_source == {"weight_version": "absent", "dtype": "measured"}
    for contract in history.contracts.values():
        assert contract["body"] == {"alignment": "token_i_given_before_i"}


def test_events_name_their_file_and_its_digest_and_the_writer_lists_all(data: Path, imports: Any) -> None:
    document = imports("miles", data / "miles")
    digests = {file["file"]: f"sha256:{file['sha256']}" for file in document["files"]}
    assert set(digests) == {"rollout_data/3.pt", "train_data/3_0.pt", "train_data/3_1.pt"}
    used = set()
    for _, _, fields, _ in open_ledger(imports.url).read_events(document["run_id"], {"rollout.sample", "logprobs"}):
        assert fields["labels"]["digest"] == digests[fields["labels"]["file"]]
        used.add(fields["labels"]["file"])
    assert used == set(digests)
    (writer,) = imports.history(document["run_id"]).writers.values()
    assert writer["role"] == "import"
    assert writer["environment"]["import"] == {"format": "miles", "files": digests}


def test_layouts_of_slime_name_the_samples_in_the_order_a_rank_trained_them(data: Path, imports: Any) -> None:
    history = imports.history(imports("slime", data / "slime")["run_id"])
    layouts = {fact.fields["layout_id"]: fact.fields for fact in history.of("batch.layout")}
    assert layouts["3-dp0"]["sample_order"] == ["3-0", "3-2", "3-4", "3-6"]
    assert layouts["3-dp1"]["sample_order"] == ["3-1", "3-3", "3-5", "3-7"]
    assert layouts["3-dp0"]["micro_batch"] == 2
    assert layouts["3-dp0"]["global_batch"] == 8
    assert {s.layout_id for s in history.scores if s.source == "training"} == set(layouts)


def test_formats_of_the_command_are_the_importers(batch_of: Callable[[str, Path], Any], data: Path) -> None:
    from rlk_ledger.commands.imports import _FORMATS

    assert tuple(FORMATS) == _FORMATS
    assert {case[0] for case in CASES.values()} == set(FORMATS)
    for form in FORMATS:
        assert batch_of(form, data / form).format == form
