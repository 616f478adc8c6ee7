"""Whatever stands in whatever field, an import is a batch of storable events or one sentence."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlk_ledger.importers import read
from rlk_ledger.importers.declared import Declared
from rlk_ledger.importers.writing import Held, _check, _new_events
from rlk_ledger_schemas.errors import FormatError, UsageError

from .conftest import rollout, save, trained
from .test_import_lines import lines, nemo, prime

plain = (
    st.none()
    | st.booleans()
    | st.sampled_from([0, 1, 2, 5, -1, 2**31, 2**63, 2**70, -(2**64)])
    | st.floats()
    | st.text(max_size=4)
    | st.sampled_from(["\ud800", "x" * 600, "7", "completed", ""])
)
values = st.recursive(
    plain,
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)
tensors = st.builds(
    lambda shape, dtype: torch.ones(shape).to(dtype),
    st.lists(st.sampled_from([0, 1, 2, 5]), max_size=3),
    st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.uint8]),
)
arrays = st.builds(
    lambda n, dtype: np.ones(n, dtype), st.sampled_from([0, 2, 5]), st.sampled_from(["f4", "f8", "i8", "b1"])
)
anything = values | tensors | arrays | st.sampled_from([np.float32(1.5), np.int64(3), (1, 2), {1, 2}])

ROLLOUT = {**rollout(), "loss_mask": None, "session_id": None, "remove_sample": False, "teacher_log_probs": None}
ROLLOUT |= dict.fromkeys(("spec_info", "prefix_cache_info", "rollout_routed_experts"))
ROLLOUT |= dict.fromkeys(("rollout_top_p_token_ids", "rollout_top_p_token_offsets"))
TRAINED = {**trained(), "entropy": None, "ref_log_probs": None}
SHARD = {"rank": 0, "data_parallel_rank": 0, "sample_indices": [0], "partition": [0], "micro_batch_indices": [[0]]}


def outcome(form: str, path: Path) -> str:
    """`taken`, or the one sentence of a refusal; anything else fails the test."""
    told = "taken"
    try:
        batch = read(form, path, lambda done, total: None)
        _check("r", list(_new_events(batch, Declared(), Held())))
    except (FormatError, UsageError) as error:
        told = str(error)
    assert "\n" not in told
    return told


common = settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@given(name=st.sampled_from(sorted(ROLLOUT)), value=anything)
@common
def test_any_value_in_any_field_of_a_rollout(name: str, value: Any, tmp_path: Path) -> None:
    outcome("slime", save(tmp_path / "d", [{**ROLLOUT, name: value}], [trained()]))


@given(name=st.sampled_from(sorted(TRAINED)), value=anything, alone=st.booleans())
@common
def test_any_value_in_any_field_of_a_train_row(name: str, value: Any, alone: bool, tmp_path: Path) -> None:
    folder = tmp_path / ("alone" if alone else "joined")
    outcome("miles", save(folder, None if alone else [rollout()], [{**TRAINED, name: value}], [trained()]))


@given(name=st.sampled_from([*SHARD, "global_batch_sizes"]), value=values, top=st.booleans())
@common
def test_any_value_in_any_field_of_a_layout(name: str, value: Any, top: bool, tmp_path: Path) -> None:
    dump = {"format_version": 2, "rollout_id": 7, "rank": 0, "samples": [trained()], "dp_shards": [SHARD]}
    if top:
        dump |= {"format_version" if name == "rank" else "dp_shards" if name == "partition" else "rollout_id": value}
    else:
        dump["dp_shards"] = [{**SHARD, name: value}]
    (tmp_path / "d").mkdir(exist_ok=True)
    torch.save(dump, tmp_path / "d/7.pt")
    outcome("slime", tmp_path / "d")


@given(
    columns=st.dictionaries(st.sampled_from([*sorted(TRAINED), "partition", "sample_indices"]), anything, max_size=2)
)
@common
def test_any_value_in_any_column(columns: dict[str, Any], tmp_path: Path) -> None:
    held = {name: [value] for name, value in trained().items()}
    (tmp_path / "d").mkdir(exist_ok=True)
    torch.save({"rollout_id": 7, "rank": 0, "rollout_data": {**held, **columns}}, tmp_path / "d/7.pt")
    outcome("vime", tmp_path / "d")


@pytest.mark.parametrize(("form", "row"), [("prime-rl", prime()), ("nemo-rl", nemo())])
def test_any_value_in_any_field_of_a_line(form: str, row: dict[str, Any], tmp_path: Path) -> None:
    @given(name=st.sampled_from(sorted(row)), value=values, deeper=st.booleans())
    @common
    def check(name: str, value: Any, deeper: bool) -> None:
        changed = {**row, name: [value] if deeper else value}
        outcome(form, lines(tmp_path / "rank_0.jsonl", json.dumps(changed)))

    check()


@given(value=anything)
@common
def test_any_value_as_a_whole_file(value: Any, tmp_path: Path) -> None:
    torch.save(value, tmp_path / "x.pt")
    assert outcome("slime", tmp_path / "x.pt") != "taken"


def test_the_rows_these_start_from_are_taken(tmp_path: Path) -> None:
    assert outcome("slime", save(tmp_path / "d", [ROLLOUT], [TRAINED])) == "taken"
    assert outcome("prime-rl", lines(tmp_path / "a.jsonl", prime())) == "taken"
    assert outcome("nemo-rl", lines(tmp_path / "b.jsonl", nemo())) == "taken"
