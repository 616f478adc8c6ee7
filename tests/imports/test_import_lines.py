"""Exports of prime-rl and logs of NeMo-RL: what a line says is taken, what it cannot say is absent."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlk_ledger.classes import MISSING


def prime(**fields: Any) -> dict[str, Any]:
    """One sequence of a prime-rl export: two prompt tokens, a response of three with a tool token in it."""
    return {
        "schema_version": 1,
        "step": 4,
        "rank": 1,
        "micro_step": 2,
        "export_sequence_idx": 6,
        "env_name": "math",
        "token_ids": [1, 2, 3, 4, 5],
        "position_ids": [0, 1, 2, 3, 4],
        "loss_mask": [False, False, True, False, True],
        "inference_logprobs": [0.0, 0.0, -0.5, 0.0, -1.5],
        "trainer_logprobs": [0.0, -9.0, -0.625, -3.0, -1.25],
        "entropy": [0.0, 0.0, 1.0, 2.0, 3.0],
        **fields,
    }


def nemo(**fields: Any) -> dict[str, Any]:
    """One sample of a NeMo-RL log: two prompt tokens, two response tokens, one of padding; batch axes of 1."""
    return {
        "idx": 0,
        "rewards": [1.0],
        "input_lengths": [4],
        "token_ids": [[1, 2, 3, 4, 0]],
        "token_loss_mask": [[0, 0, 1, 1, 0]],
        "sample_loss_mask": [1.0],
        "generation_logprobs": [[0.0, 0.0, -0.5, -1.5, 0.0]],
        "prev_logprobs": [[0.0, 0.0, -0.625, -1.25, 0.0]],
        **fields,
    }


def lines(path: Path, *rows: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


Write = Callable[..., Path]


@pytest.fixture
def exported(tmp_path: Path) -> Write:
    """Writes a complete export of one rank."""

    def write(*rows: Any, stable: bool = True) -> Path:
        lines(tmp_path / "token_exports/step_4/rank_1.jsonl", *rows)
        if stable:
            (tmp_path / "token_exports/step_4/STABLE").touch()
        return tmp_path / "token_exports"

    return write


@pytest.fixture
def logged(tmp_path: Path) -> Write:
    """Writes the log of one step."""
    return lambda *rows: lines(tmp_path / "exp/train_data_step12.jsonl", *rows)


def only(imports: Any, run_id: str) -> tuple[Any, dict[str, Any]]:
    history = imports.history(run_id)
    (sample,) = history.samples
    return sample, {score.source: score for score in history.scores}


def test_a_prime_rl_sequence_splits_where_its_loss_begins(exported: Write, imports: Any) -> None:
    sample, scores = only(imports, imports("prime-rl", exported(prime()))["run_id"])
    assert (sample.sample_id, sample.step, sample.labels["env"]) == ("4-1-6", 4, "math")
    assert sample.prompt_token_ids.tolist() == [1, 2]
    assert sample.response_token_ids.tolist() == [3, 4, 5]
    assert sample.loss_mask.tolist() == [1, 0, 1]
    assert sample.metadata_source["prompt_token_ids"] == "derived"
    assert {sample.metadata_source[name] for name in ("weight_spans", "sampling", "engine", "group_id")} == {"absent"}
    assert scores["rollout"].value_class.tolist() == [0, MISSING, 0]
    assert scores["training"].value_class is None
    assert scores["training"].values.tolist() == [-0.625, -3.0, -1.25]
    assert scores["training"].layout_id == "4-1-micro2"
    assert sample.position_ids is None


def test_null_is_missing_on_both_sides_and_a_zero_at_a_loss_token_is_a_value(exported: Write, imports: Any) -> None:
    row = prime(inference_logprobs=[0.0, 0.0, None, 0.0, 0.0], trainer_logprobs=[0.0, 0.0, -0.5, None, None])
    _, scores = only(imports, imports("prime-rl", exported(row))["run_id"])
    assert scores["rollout"].value_class.tolist() == [MISSING, MISSING, 0]
    assert scores["rollout"].values[2] == 0.0
    assert scores["training"].value_class.tolist() == [0, MISSING, MISSING]
    assert math.isnan(scores["training"].values[1])


def test_fields_of_newer_exports_are_used(exported: Write, imports: Any) -> None:
    row = prime(export_step=5, run_id="run_a", rewards=[0.0, 0.0, 0.5, 0.0, 0.5], position_ids=[7, 8, 9, 10, 11])
    sample, _ = only(imports, imports("prime-rl", exported(row))["run_id"])
    assert (sample.step, sample.sample_id, sample.reward) == (5, "5-1-6", 0.5)
    assert sample.metadata_source["reward"] == "derived"
    assert sample.position_ids.tolist() == [9, 10, 11]


def test_a_step_without_stable_is_said_to_be_unfinished(exported: Write, imports: Any) -> None:
    document = imports("prime-rl", exported(prime(), stable=False))
    (finding,) = document["findings"]
    assert (finding["finding_id"], document["exit_code"]) == ("evidence.incomplete", 3)
    assert "STABLE" in finding["evidence"]["reason"]


@pytest.mark.parametrize(
    ("rows", "told"),
    [
        ((prime(schema_version=2),), "`schema_version` 2; schema 1"),
        ((prime(schema_version=None),), "no `schema_version`"),
        ((prime(), prime()), "is in step_4/rank_1.jsonl, line 1 too"),
        ((prime(trainer_logprobs=[0.0]),), "has 1 entries for 5 tokens"),
        ((prime(position_ids=[0]),), "`position_ids` has 1 entries"),
        ((prime(loss_mask=[0, 0, 2, 0, 1]),), "0 and 1 only"),
        ((prime(token_ids=[1, 2, 3, 4, 1 << 40]),), "does not fit 32 bits"),
        ((prime(step=-1),), "whole number"),
        (('{"schema_version": 1, "step"',), "line 1 is no JSON"),
        (("[" * 100_000,), "nested deeper"),
        (('{"step": ' + "9" * 5000 + "}",), "too long"),
        (("[1]",), "not a mapping"),
        (('{"step": 1, "step": 2}',), "line 1 names the field 'step' twice"),
        (('{"a": [{"b": 1, "c": 2, "b": 1}]}',), "line 1 names the field 'b' twice"),
        (('"\\ud800"',), "not a mapping"),
    ],
)
def test_prime_rl_lines_that_cannot_be_believed_are_refused(
    rows: tuple[Any, ...], told: str, exported: Write, imports: Any
) -> None:
    assert told in imports.refused("prime-rl", exported(*rows))


def test_bytes_that_are_no_text_and_a_cut_line_are_refused(exported: Write, imports: Any) -> None:
    folder = exported(prime())
    path = folder / "step_4/rank_1.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole[:-200])
    assert "line 1 is cut off" in imports.refused("prime-rl", folder)
    path.write_bytes(whole.replace(b"math", b"\xff\xfe\xfd\xfc"))
    assert "UTF-8" in imports.refused("prime-rl", folder)


def test_a_nemo_rl_sample_loses_its_batch_axis_and_its_padding(logged: Write, imports: Any) -> None:
    sample, scores = only(imports, imports("nemo-rl", logged(nemo()))["run_id"])
    assert (sample.sample_id, sample.step, sample.reward) == ("12-0", 12, 1.0)
    assert sample.prompt_token_ids.tolist() == [1, 2]
    assert sample.response_token_ids.tolist() == [3, 4]
    assert scores["rollout"].values.tolist() == [-0.5, -1.5]
    assert scores["training"].values.tolist() == [-0.625, -1.25]
    assert (sample.metadata_source["group_id"], sample.metadata_source["weight_spans"]) == ("absent", "absent")


def test_rows_without_the_batch_axis_read_the_same(logged: Write, imports: Any) -> None:
    flat = {name: value[0] if isinstance(value, list) else value for name, value in nemo().items()}
    sample, scores = only(imports, imports("nemo-rl", logged(flat))["run_id"])
    assert sample.response_token_ids.tolist() == [3, 4]
    assert scores["training"].values.tolist() == [-0.625, -1.25]


def test_a_sample_out_of_the_loss_has_no_active_token_and_keeps_its_prompt(logged: Write, imports: Any) -> None:
    sample, _ = only(imports, imports("nemo-rl", logged(nemo(sample_loss_mask=[0.0])))["run_id"])
    assert sample.prompt_token_ids.tolist() == [1, 2]
    assert sample.loss_mask.tolist() == [0, 0]


def test_nan_and_infinity_keep_their_bits_and_are_judged_by_the_audit(logged: Write, imports: Any) -> None:
    row = nemo(generation_logprobs=[[0.0, 0.0, math.nan, -math.inf, 0.0]])
    run = imports("nemo-rl", logged(row))["run_id"]
    _, scores = only(imports, run)
    assert np.isnan(scores["rollout"].values[0])
    assert scores["rollout"].values[1] == -np.inf
    assert scores["rollout"].value_class is None
    named = {f.finding_id for f in imports.audit(run).findings}
    assert {"values.nan", "values.inf"} <= named


def test_under_dynamic_sampling_the_filtered_reward_is_the_lines_own(logged: Write, imports: Any) -> None:
    sample, _ = only(imports, imports("nemo-rl", logged(nemo(rewards=[0.0], filtered_rewards=[1.0])))["run_id"])
    assert sample.reward == 1.0


def test_logs_of_before_the_token_ids_are_refused(logged: Write, imports: Any) -> None:
    assert "it has no `token_ids`" in imports.refused("nemo-rl", logged(nemo(token_ids=None)))


def test_a_file_that_names_no_step_has_none(tmp_path: Path, imports: Any) -> None:
    sample, _ = only(imports, imports("nemo-rl", lines(tmp_path / "log.jsonl", nemo()))["run_id"])
    assert (sample.sample_id, sample.step) == ("log-0", None)


@pytest.mark.parametrize(
    ("row", "told"),
    [
        (nemo(token_ids=[[1, 2], [3, 4]]), "holds 2 sequences"),
        (nemo(rewards=[1.0, 2.0]), "`rewards` holds 2 entries"),
        (nemo(input_lengths=[6]), "`input_lengths` is 6 and there are 5"),
        (nemo(input_lengths=[3]), "trains on padding"),
        (nemo(sample_loss_mask=[0.5]), "must be 0 or 1"),
        (nemo(prev_logprobs=[[0.0]]), "has 1 entries for 5 tokens"),
        (nemo(token_loss_mask=None), "must be a list of numbers, got nothing"),
        (prime(), "token_loss_mask"),
    ],
)
def test_nemo_rl_lines_that_cannot_be_believed_are_refused(
    row: dict[str, Any], told: str, logged: Write, imports: Any
) -> None:
    assert told in imports.refused("nemo-rl", logged(row))


def test_samples_without_any_loss_are_all_prompt(logged: Write, imports: Any) -> None:
    sample, scores = only(imports, imports("nemo-rl", logged(nemo(token_loss_mask=[[0] * 5])))["run_id"])
    assert sample.prompt_token_ids.tolist() == [1, 2, 3, 4]
    assert len(sample) == len(scores["rollout"].values) == 0
