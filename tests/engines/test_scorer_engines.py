"""vLLM and Megatron-core as scorers: their float32 is the reference's, and the path asked for is the path taken."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest

import rlk_ledger_replay
from rlk_ledger_replay.decoder import Decoder
from rlk_ledger_replay.numerics import Numerics
from rlk_ledger_replay.scorers.child import Answer, run_child
from rlk_ledger_replay.scorers.protocol import ExecutionPath, Job, Layout, Pass, sequence
from rlk_ledger_replay.weights import live_digest

pytestmark = pytest.mark.engines

MODEL = Path(rlk_ledger_replay.__path__[0]) / "model"
TOGETHER, ALONE = Layout("together", ((0, 1, 2, 3),)), Layout("alone", ((3,), (1,)), "none")
PATHS: tuple[ExecutionPath, ...] = get_args(ExecutionPath)


def texts() -> list[tuple[list[int], int]]:
    prose = (__doc__ or "").encode() * 6
    return [([256, *prose[19 * i : 19 * i + 50 + 3 * i]], 20 + 3 * i) for i in range(4)]


def run(engine: str, **changes: Any) -> Answer:
    fields: dict[str, Any] = {
        "engine": engine,
        "folder": str(MODEL),
        "weights": live_digest(Decoder.load(MODEL).checkpoint.tensors),
        "dtype": "float32",
        "mode": "processed",
        "sequences": tuple(sequence(ids, start, 0.7) for ids, start in texts()),
        "passes": tuple(Pass(f"{path}.{one.name}", path, one) for path in PATHS for one in (TOGETHER, ALONE)),
    }
    job = Job(**(fields | changes))
    return run_child(f"rlk_ledger_replay.scorers.{engine}", job, python=sys.executable, timeout=240)


def reference(**numerics: Any) -> list[Any]:
    return [row.numpy() for row in Decoder.load(MODEL, Numerics(**numerics)).prefill_logprobs_batch(texts())]


def flat(rows: list[Any]) -> Any:
    return np.concatenate(rows)


def statuses(answer: Answer, *passes: str) -> dict[str, str]:
    assert answer.statement is not None
    guards = [*answer.statement.guards, *(guard for name in passes for guard in answer.guards[name])]
    return {guard.name: guard.status for guard in guards}


@pytest.fixture(scope="module")
def vllm() -> Answer:
    answer = run("vllm")
    assert answer.problems == {}
    return answer


def test_vllm_in_float32_is_the_reference_along_both_paths_and_in_every_layout(vllm: Answer) -> None:
    wanted = reference(temperature=0.7)
    for path in PATHS:
        np.testing.assert_allclose(flat(vllm.values[f"{path}.together"]), flat(wanted), atol=1e-4)
        for index in (1, 3):
            np.testing.assert_allclose(vllm.values[f"{path}.alone"][index], wanted[index], atol=1e-4)
        assert np.isnan(vllm.values[f"{path}.alone"][0]).all(), "a sequence outside the layout has no value"


def test_the_pitfalls_of_vllm_are_read_from_the_live_engine(vllm: Answer) -> None:
    found = statuses(vllm, "prefill.together", "decode.together", "prefill.alone", "decode.alone")
    assert set(found.values()) == {"passed"}
    assert {
        "weights.held",
        "chunked_prefill.off",
        "prefix_cache.off",
        "prefix_cache.unused",
        "attention.backend",
        "attention.num_splits",
        "logprobs_mode",
        "prefill.position_zero",
        "prefill.whole",
        "prefill.temperature",
        "decode.tokens",
        "decode.forced",
        "decode.one_at_a_time",
        "layout.together",
    } <= set(found)
    assert vllm.statement is not None
    assert "Sampler.sample" in vllm.statement.how["decode"]
    assert {knob.path: knob.actual for knob in vllm.statement.knobs}["enable_chunked_prefill"] is False


def test_vllm_takes_a_declared_float32_head_and_raw_values() -> None:
    answer = run("vllm", dtype="bfloat16", head="float32", mode="raw", passes=(Pass("decode", "decode", TOGETHER),))
    assert answer.problems == {}
    assert set(statuses(answer, "decode").values()) == {"passed"}
    wanted = reference(logprob_mode="raw")
    apart = flat(answer.values["decode"]).astype(np.float64) - flat(wanted)
    assert 1e-3 < np.sqrt((apart**2).mean()) < 0.1, "bf16 rounds, and raw values are not those at the temperature"
    assert answer.statement is not None
    assert {knob.path: knob.actual for knob in answer.statement.knobs}["head_dtype"] == "float32"


def test_a_guard_sees_weights_that_are_not_the_published_ones_and_several_temperatures_are_refused() -> None:
    sequences = tuple(sequence(ids, start, 0.7 + index / 10) for index, (ids, start) in enumerate(texts()))
    answer = run("vllm", weights="sum64x2:" + "0" * 32, sequences=sequences)
    assert statuses(answer)["weights.held"] == "failed"
    assert set(answer.problems) == {"prefill.together"}
    assert answer.problems["prefill.together"].status == "not_measured"
    assert "several temperatures" in answer.problems["prefill.together"].reason
    wanted = reference(temperature=1.0)
    assert wanted[0].shape == answer.values["decode.together"][0].shape
    last = Decoder.load(MODEL, Numerics(temperature=1.0)).prefill_logprobs_batch(texts()[3:])[0].numpy()
    np.testing.assert_allclose(answer.values["decode.together"][3], last, atol=1e-4)


@pytest.mark.parametrize("ranks", [1, 2])
def test_megatron_in_float32_is_the_reference_on_one_rank_and_on_two(ranks: int) -> None:
    answer = run("megatron", tensor_parallel=ranks)
    wanted = reference(temperature=0.7)
    np.testing.assert_allclose(flat(answer.values["prefill.together"]), flat(wanted), atol=3e-5)
    np.testing.assert_allclose(answer.values["prefill.alone"][3], wanted[3], atol=3e-5)
    found = statuses(answer, "prefill.together")
    assert set(found.values()) == {"passed"}
    assert {"weights.held", "tensor_parallel", "replicas.equal", "fusions.off"} <= set(found)
    assert {name: one.status for name, one in answer.problems.items()} == {
        "decode.together": "not_measured",
        "decode.alone": "not_measured",
    }


def test_more_ranks_than_key_heads_is_not_measured() -> None:
    answer = run("megatron", tensor_parallel=4)
    assert {one.status for one in answer.problems.values()} == {"not_measured"}
    assert "2 key heads cannot be split over 4" in answer.problems["prefill.together"].reason
