"""A trainer's row belongs to the sample with its tokens; what does not fit is named, never guessed."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from .conftest import rollout, save, trained


def findings(document: dict[str, Any]) -> list[tuple[str, str]]:
    return [(f["finding_id"], f["severity"]) for f in document["findings"]]


def training(imports: Any, run_id: str) -> dict[str, list[float]]:
    return {s.sample_id: s.values.tolist() for s in imports.history(run_id).scores if s.source == "training"}


def test_positions_that_lie_are_not_believed_and_said(data: Path, imports: Any) -> None:
    straight = imports("slime", data / "slime", "--run-id", "straight")
    gathered = imports("slime", data / "slime-gather-order", "--run-id", "gathered")
    assert straight["notes"] == []
    assert gathered["notes"] == [
        "step 3: 6 of 8 rows name another position than their tokens have in the rollout; the tokens were believed."
    ]
    assert training(imports, "gathered") == training(imports, "straight")


def test_an_index_that_lies_is_not_believed_either(tmp_path: Path, imports: Any) -> None:
    other = {"index": 1, "tokens": [1, 2, 3, 8, 9]}
    rows = [
        trained(sample_index=1),
        trained(sample_index=0, tokens=[1, 2, 3, 8, 9], log_probs=torch.tensor([-3.0, -4.0])),
    ]
    run = imports("slime", save(tmp_path / "d", [rollout(), rollout(**other)], rows))["run_id"]
    assert training(imports, run) == {"7-0": [-0.625, -1.25], "7-1": [-3.0, -4.0]}


def test_equal_tokens_are_told_apart_by_the_index(tmp_path: Path, imports: Any) -> None:
    rows = [trained(sample_index=1, log_probs=torch.tensor([-3.0, -4.0])), trained()]
    run = imports("slime", save(tmp_path / "d", [rollout(), rollout(index=1)], rows))["run_id"]
    assert training(imports, run) == {"7-0": [-0.625, -1.25], "7-1": [-3.0, -4.0]}


def test_equal_tokens_are_told_apart_by_the_rollout_values_the_row_carries(tmp_path: Path, imports: Any) -> None:
    rollouts = [rollout(), rollout(index=1, rollout_log_probs=[-0.25, -1.5])]
    rows = [trained(sample_index=None, rollout_log_probs=torch.tensor([-0.25, -1.5]))]
    document = imports("slime", save(tmp_path / "d", rollouts, rows))
    assert training(imports, document["run_id"]) == {"7-1": [-0.625, -1.25]}


def test_equal_tokens_that_nothing_tells_apart_are_left_out_and_named(tmp_path: Path, imports: Any) -> None:
    rows = [trained(sample_index=None), trained(sample_index=None)]
    document = imports("slime", save(tmp_path / "d", [rollout(), rollout(index=1)], rows))
    assert ("samples.ambiguous", "error") in findings(document)
    assert document["exit_code"] == 1
    assert training(imports, document["run_id"]) == {}
    audit = {f.finding_id for f in imports.audit(document["run_id"]).findings}
    assert "coverage.unobserved" in audit


def test_a_row_with_other_tokens_is_recorded_as_having_scored_them(tmp_path: Path, imports: Any) -> None:
    document = imports("slime", save(tmp_path / "d", [rollout()], [trained(tokens=[1, 2, 3, 4, 6])]))
    assert findings(document) == [("tokens.differ", "error")]
    assert document["exit_code"] == 1
    found = {f.finding_id: f for f in imports.audit(document["run_id"]).findings}
    assert found["tokens.differ"].where["first_index"] == 1


def test_a_row_that_names_no_sample_and_has_no_samples_tokens_is_left_out_and_named(
    tmp_path: Path, imports: Any
) -> None:
    rows = [trained(), trained(sample_index=None, tokens=[9, 9, 9, 9, 9])]
    document = imports("slime", save(tmp_path / "d", [rollout()], rows))
    assert findings(document) == [("evidence.incomplete", "gap")]
    assert document["exit_code"] == 3
    assert training(imports, document["run_id"]) == {"7-0": [-0.625, -1.25]}


def test_a_prompt_that_ends_elsewhere_is_another_sample(tmp_path: Path, imports: Any) -> None:
    row = trained(
        response_lengths=3,
        loss_masks=torch.tensor([1, 1, 1]),
        log_probs=torch.zeros(3) - 1,
        rollout_log_probs=torch.zeros(3) - 1,
    )
    document = imports("slime", save(tmp_path / "d", [rollout()], [row]))
    assert findings(document) == [("tokens.differ", "error")]


def test_a_missing_rank_file_is_seen_by_the_import_and_by_the_audit(dumps: Path, imports: Any) -> None:
    (dumps / "miles/train_data/3_1.pt").unlink()
    document = imports("miles", dumps / "miles")
    (finding,) = document["findings"]
    assert (finding["finding_id"], document["exit_code"]) == ("evidence.incomplete", 3)
    assert finding["where"]["samples"] == 4
    assert finding["evidence"]["sample_ids"] == ["3-1", "3-3", "3-5", "3-7"]
    audit = imports.audit(document["run_id"])
    (unseen,) = [f for f in audit.findings if f.finding_id == "coverage.unobserved"]
    assert unseen.evidence["sample_ids"] == ["3-1", "3-3", "3-5", "3-7"]


def test_a_missing_rank_in_the_middle_is_named(dumps: Path, imports: Any) -> None:
    (dumps / "miles/train_data/3_0.pt").unlink()
    document = imports("miles", dumps / "miles/train_data")
    (finding,) = document["findings"]
    assert finding["where"]["missing_ranks"] == [0]
    assert finding["where"]["missing_positions"] == [0, 2, 4, 6]


def test_ranks_that_repeat_each_other_are_one_pass(tmp_path: Path, imports: Any) -> None:
    document = imports("miles", save(tmp_path / "d", [rollout()], [trained()], [trained()]))
    assert (document["findings"], document["logprobs"]) == ([], {"rollout": 1, "training": 1})


def test_ranks_that_differ_are_both_kept_and_named(tmp_path: Path, imports: Any) -> None:
    other = trained(log_probs=torch.tensor([-0.625, -1.5]))
    document = imports("miles", save(tmp_path / "d", [rollout()], [trained()], [other]))
    (finding,) = document["findings"]
    assert (finding["finding_id"], finding["where"]["position"], document["exit_code"]) == ("replicas.differ", 1, 1)
    passes = {
        s.pass_id: s.values.tolist() for s in imports.history(document["run_id"]).scores if s.source == "training"
    }
    assert passes == {None: [-0.625, -1.25], "rank-1": [-0.625, -1.5]}


def test_a_trainers_copy_that_is_not_what_the_engine_returned_is_named(tmp_path: Path, imports: Any) -> None:
    document = imports(
        "slime", save(tmp_path / "d", [rollout()], [trained(rollout_log_probs=torch.tensor([-0.5, 0.0]))])
    )
    (finding,) = document["findings"]
    assert (finding["finding_id"], finding["where"]["source"]) == ("replicas.differ", "rollout")
    first = next(s for s in imports.history(document["run_id"]).scores if s.source == "rollout" and s.pass_id is None)
    assert first.values.tolist() == [-0.5, -1.5]


def test_a_trainers_mask_that_is_not_the_samples_is_named_by_the_audit(tmp_path: Path, imports: Any) -> None:
    rows = [trained(loss_masks=torch.tensor([1, 0]))]
    run = imports("slime", save(tmp_path / "d", [rollout()], rows))["run_id"]
    result = imports.audit(run)
    assert ("mask.differs", "training") in {(f.finding_id, f.where.get("source")) for f in result.findings}
    assert (result.verdict, result.exit_code) == ("not_comparable", 1)


def test_train_dumps_alone_are_whole_samples(data: Path, imports: Any, truth: list[dict[str, Any]]) -> None:
    run = imports("slime", data / "slime/train_data/3.pt")["run_id"]
    history = imports.history(run)
    assert sorted(s.sample_id for s in history.samples) == [f"3-{i}" for i in range(8)]
    assert not any(s.weight_spans for s in history.samples)
    rollouts = {s.sample_id: s.values for s in history.scores if s.source == "rollout"}
    for real in truth:
        active = np.array(real["loss_mask"]) == 1
        got = rollouts[f"3-{real['index']}"][active]
        assert got.tolist() == np.array(real["rollout"], np.float32)[active].tolist()


def test_training_values_may_come_after_the_rollouts(data: Path, imports: Any) -> None:
    first = imports("slime", data / "slime/rollout_data", "--run-id", "r")
    assert (first["samples"], first["logprobs"]) == (8, {"rollout": 8})
    second = imports("slime", data / "slime/train_data/3.pt", "--run-id", "r")
    assert (second["samples"], second["logprobs"]) == (0, {"training": 8})
    imports("slime", data / "slime", "--run-id", "whole")
    assert training(imports, "r") == training(imports, "whole")
    assert imports.audit("r").summary["compared_tokens"] == imports.audit("whole").summary["compared_tokens"] == 248


def test_columns_of_a_rank_read_as_its_rows(tmp_path: Path, data: Path, imports: Any) -> None:
    rows = [
        r for rank in (0, 1) for r in torch.load(data / f"miles/train_data/3_{rank}.pt", weights_only=True)["samples"]
    ]
    for rank in (0, 1):
        mine = [row for row in rows if row["data_parallel_rank"] == rank]
        columns = {
            "tokens": [torch.tensor(row["tokens"]) for row in mine],
            "response_lengths": [row["response_lengths"] for row in mine],
            "loss_masks": [row["loss_masks"] for row in mine],
            "log_probs": [row["log_probs"] for row in mine],
            "rollout_log_probs": [row["rollout_log_probs"] for row in mine],
            "partition": [row["rollout_position"] for row in mine],
            "raw_reward": [0.0] * 8,
            "micro_batch_indices": [[0, 1], [2, 3]],
            "global_batch_sizes": [8],
            "pixels": torch.zeros(3, 3),
        }
        (tmp_path / "train_data").mkdir(exist_ok=True)
        path = tmp_path / f"train_data/3_{rank}.pt"
        torch.save({"rollout_id": 3, "rank": rank, "rollout_data": columns}, path)
    shutil.copytree(data / "miles/rollout_data", tmp_path / "rollout_data")
    run = imports("slime", tmp_path)["run_id"]
    imports("miles", data / "miles", "--run-id", "rows")
    assert training(imports, run) == training(imports, "rows")
    layouts = {f.fields["layout_id"]: f.fields for f in imports.history(run).of("batch.layout")}
    assert layouts["3-dp1"]["sample_order"] == ["3-1", "3-3", "3-5", "3-7"]
    assert layouts["3-dp1"]["micro_batch"] == 2


def test_format_2_as_it_is_written_with_tensors_and_places_instead_of_indices(tmp_path: Path, imports: Any) -> None:
    rollouts = [rollout(index=None, tokens=[1, 2, 3, 4, i]) for i in range(4)]
    rows = [
        trained(
            sample_index=None,
            rollout_position=place,
            data_parallel_rank=place % 2,
            tokens=torch.tensor([1, 2, 3, 4, place]),
            log_probs=torch.tensor([-1.0 * place, -0.5]),
            raw="x",
        )
        for place in range(4)
    ]
    shards = [
        {"rank": 8 * dp, "data_parallel_rank": dp, "sample_indices": [None] * 2, "partition": [2 + dp, dp]}
        | {"micro_batch_indices": [[0], [1]], "num_microbatches": [1, 1], "global_batch_sizes": [2, 2]}
        for dp in (0, 1)
    ]
    folder = save(tmp_path / "d", rollouts)
    dump = {"format_version": 2, "rollout_id": 7, "rank": 0, "samples": rows, "dp_shards": shards, "raw_reward": [1.0]}
    torch.save(dump, folder / "train_data/7.pt")
    document = imports("vime", folder)
    assert (document["findings"], document["notes"]) == ([], [])
    run = document["run_id"]
    assert training(imports, run) == {f"7-p{i}": [-1.0 * i, -0.5] for i in range(4)}
    layouts = {f.fields["layout_id"]: f.fields for f in imports.history(run).of("batch.layout")}
    assert layouts["7-dp0"]["sample_order"] == ["7-p2", "7-p0"]
    assert layouts["7-dp1"]["sample_order"] == ["7-p3", "7-p1"]
    assert layouts["7-dp0"]["micro_batch"] == 1
    assert "global_batch" not in layouts["7-dp0"]


def test_parts_of_a_context_parallel_pass_are_refused(tmp_path: Path, imports: Any) -> None:
    told = imports.refused("slime", save(tmp_path / "d", [rollout()], [trained(log_probs=torch.tensor([-0.5]))]))
    assert "context-parallel" in told


def test_several_steps_keep_apart_and_evaluations_are_left_out(tmp_path: Path, imports: Any) -> None:
    folder = save(tmp_path / "d", [rollout()], [trained()], step=9)
    save(folder, [rollout()], [trained()], step=10)
    torch.save({"rollout_id": 10, "samples": [rollout(index=5)]}, folder / "rollout_data/eval_10.pt")
    torch.save({"rollout_id": 10, "samples": [rollout(index=5)]}, folder / "rollout_data/rollout_eval_9.pt")
    torch.save({"weights": torch.zeros(2)}, folder / "optimizer.pt")
    document = imports("slime", folder)
    assert [f["file"] for f in document["files"]][:2] == ["rollout_data/9.pt", "rollout_data/10.pt"]
    assert document["notes"] == [
        "2 evaluation dumps were left out: nobody trains on them.",
        "optimizer.pt was left out: it is no rollout or train dump.",
    ]
    assert sorted(training(imports, document["run_id"])) == ["10-0", "9-0"]


def test_two_rollout_dumps_of_one_step_are_refused(tmp_path: Path, imports: Any) -> None:
    folder = save(tmp_path / "d", [rollout()])
    torch.save({"rollout_id": 7, "samples": [rollout(index=1)]}, folder / "rollout_data/copy.pt")
    assert "a second rollout dump of step 7" in imports.refused("slime", folder)


def test_weight_versions_become_a_span_only_when_every_call_had_the_same(tmp_path: Path, imports: Any) -> None:
    cases = {
        0: (["7"], (("7", 0, 2),)),
        1: (["7", "7"], (("7", 0, 2),)),
        2: (["7", "8"], ()),
        3: ([], ()),
        4: ([7], (("7", 0, 2),)),
        5: ([None], ()),
    }
    rollouts = [rollout(index=i, tokens=[1, 2, 3, 4, i], weight_versions=v) for i, (v, _) in cases.items()]
    history = imports.history(imports("slime", save(tmp_path / "d", rollouts))["run_id"])
    for sample in history.samples:
        expected = cases[int(sample.sample_id.split("-")[1])][1]
        assert sample.weight_spans == expected
        assert sample.metadata_source["weight_spans"] == ("derived" if expected else "absent")


def test_optional_fields_of_a_sample_are_kept_where_they_were_measured(tmp_path: Path, imports: Any) -> None:
    experts = [torch.arange(2 * 2 * 2).reshape(2, 2, 2), torch.zeros(2, 2, 2, dtype=torch.int32)]
    rich = rollout(
        session_id="s",
        spec_info={"spec_verify_ct": 2, "spec_draft_token_num": 6, "spec_accept_token_num": 4},
        prefix_cache_info={"cached_tokens": 2, "total_prompt_tokens": 3},
        rollout_top_p_token_ids=[4, 9, 5],
        rollout_top_p_token_offsets=torch.tensor([0, 2, 3]),
        rollout_routed_experts=experts,
        teacher_log_probs=[-0.5, -0.75],
        loss_mask=[1, 0],
        reward={"format": 1.0},
    )
    plain = rollout(
        index=1, spec_info={"spec_verify_ct": 0}, remove_sample=True, status="pending", weight_versions=["7"]
    )
    history = imports.history(imports("vime", save(tmp_path / "d", [rich, plain]))["run_id"])
    one, two = sorted(history.samples, key=lambda s: s.sample_id)
    assert one.dims["spec"] == {"drafted": 6, "accepted": 4}
    assert one.cache == {"cached_tokens": 2}
    assert (one.routed_experts["coverage"], one.routed_experts["layers"], one.routed_experts["top_k"]) == (1.0, 2, 2)
    assert one.loss_mask.tolist() == [1, 0]
    assert (one.reward, one.metadata_source["reward"]) == (None, "absent")
    assert two.loss_mask.tolist() == [0, 0]
    assert (two.metadata_source["loss_mask"], two.metadata_source["status"]) == ("derived", "absent")
    assert "spec" not in two.dims
    assert two.metadata_source["spec"] == "absent"
    teacher = next(s for s in history.scores if s.source == "teacher")
    assert teacher.values.tolist() == [-0.5, -0.75]


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"tokens": [1, 2, 3, 4, 2**31]}, "does not fit 32 bits"),
        ({"tokens": [1, 2, 3, 4, 5.0]}, "list of whole numbers"),
        ({"tokens": [1, 2, 3, 4, True]}, "list of whole numbers"),
        ({"tokens": "text"}, "must be a list of numbers"),
        ({"tokens": torch.zeros(2, 2, dtype=torch.int64)}, "one dimension was expected"),
        ({"tokens": torch.zeros(5)}, "has dtype float32"),
        ({"response_length": 6}, "`response_length` is 6 and there are 5 `tokens`"),
        ({"response_length": -1}, "whole number"),
        ({"response_length": None}, "`response_length` is missing"),
        ({"response_length": True}, "whole number"),
        ({"rollout_log_probs": [-0.5]}, "has 1 entries for 2 tokens"),
        ({"rollout_log_probs": [-0.5, 1e300]}, "does not fit 32 bits"),
        ({"rollout_log_probs": [-0.5, "x"]}, "list of numbers"),
        ({"loss_mask": [1, 2]}, "0 and 1 only"),
        ({"loss_mask": [1]}, "has 1 entries for 2 tokens"),
        ({"session_id": "\ud800"}, "short text"),
        ({"weight_versions": ["\ud800"]}, "surrogate"),
        ({"rollout_top_p_token_ids": [1], "rollout_top_p_token_offsets": [0, 2, 1]}, "do not cut"),
        ({"prefix_cache_info": [1]}, "not a mapping"),
    ],
)
def test_rows_that_cannot_be_believed_are_refused_in_one_sentence(
    fields: dict[str, Any], told: str, tmp_path: Path, imports: Any
) -> None:
    sentence = imports.refused("slime", save(tmp_path / "d", [rollout(**fields)]))
    assert told in sentence, sentence


def test_an_active_zero_stays_a_value_for_the_audit_to_judge(tmp_path: Path, imports: Any) -> None:
    rollouts, rows = [], []
    for i in range(20):
        tokens = [1, 2, 3, 4, i]
        rollouts.append(rollout(index=i, tokens=tokens, rollout_log_probs=[-0.5 - i / 50, 0.0 if i < 6 else -1.5]))
        rows.append(
            trained(
                sample_index=i, tokens=tokens, log_probs=torch.tensor([-0.5 - i / 50, -1.5]), rollout_log_probs=None
            )
        )
    document = imports("slime", save(tmp_path / "d", rollouts, rows))
    scores = imports.history(document["run_id"]).scores
    assert all(s.value_class is None for s in scores)
    assert "values.defaulted" in {f.finding_id for f in imports.audit(document["run_id"]).findings}
