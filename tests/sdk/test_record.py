"""record(): both forms, arrays of every kind, scopes, references, off switches, threads."""

import contextvars
import math
import struct
import subprocess
import sys
import threading

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlk_ledger_schemas import fingerprints
from rlk_ledger_schemas.errors import EventError
from rlk_ledger_schemas.events import KnobApplied, Logprobs
from rlk_ledger_sdk import api, flush, init, record, scope
from rlk_ledger_sdk.durability import LEVELS
from rlk_ledger_sdk.testing import unaccounted


def knob(path="a", **fields):
    return record("knob.applied", path=path, requested=1, status="applied", **fields)


def test_a_writer_opens_its_run_and_itself_before_the_first_event(opened, image):
    recorder = opened(role="rollout", rank=1, world_size=4, roles={"rollout": 4}, engine="vllm")
    knob()
    first, second, third = image(recorder).events
    assert (first.type, first.fields["roles"]) == ("run.opened", {"rollout": 4})
    assert (second.type, second.fields["rank"], second.fields["engine"]) == ("writer.opened", 1, {"name": "vllm"})
    assert second.fields["environment"]["torch"] == torch.__version__
    assert (third.type, third.seq) == ("knob.applied", 2)


def test_keyword_and_typed_form_store_the_same_fields(opened, image):
    recorder = opened()
    record("logprobs", sample_id="s", source="training", values=[-1.0, -2.0], contract_id="c", step=4)
    record(Logprobs(sample_id="s", source="training", values=[-1.0, -2.0], contract_id="c", step=4))
    one, two = image(recorder).events[2:]
    assert (one.fields, one.arrays) == (two.fields, two.arrays)


def test_lists_numpy_and_torch_store_the_same_arrays(opened, image):
    recorder = opened()
    ids, mask = [1, 2, 70000], [1, 0, 1]
    for make in (list, np.array, torch.tensor, lambda x: np.array(x, dtype=np.int32)):
        record("rollout.sample", sample_id="s", response_token_ids=make(ids), loss_mask=make(mask))
    assert [e.arrays for e in image(recorder).events[2:]] == [{"response_token_ids": ids, "loss_mask": mask}] * 4


@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(bits=st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=20))
def test_any_float32_bits_survive(opened, bits):
    """NaN payloads, infinities and -0.0 are stored as they came."""
    recorder = opened()
    record("logprobs", sample_id="s", source="rollout", contract_id="c", values=np.array(bits, "u4").view("f4"))
    data = (recorder.directory / "00000000.spool").read_bytes()
    assert struct.pack(f"<{len(bits)}I", *bits) in data


def test_none_among_listed_logprobs_is_a_missing_value(opened, image):
    recorder = opened()
    record("logprobs", sample_id="s", source="rollout", contract_id="c", values=[None, -0.5, None])
    arrays = image(recorder).events[2].arrays
    assert [math.isnan(v) for v in arrays["values"]] == [True, False, True]
    assert arrays["value_class"] == [5, 0, 5]


def test_the_caller_may_change_an_array_after_record(opened, image):
    recorder = opened()
    values = np.array([-1.0, -2.0], dtype=np.float32)
    record("logprobs", sample_id="s", source="rollout", contract_id="c", values=values)
    values[:] = 9
    assert image(recorder).events[2].arrays["values"] == [-1.0, -2.0]


def test_references_name_the_stored_event(opened, image):
    recorder = opened()
    reference = knob(path="named")
    assert reference.writer_id == recorder.writer_id
    stored = next(e for e in image(recorder).events if e.seq == reference.seq)
    assert stored.fields["path"] == "named"
    assert reference.contract_id is None


def test_a_contract_is_declared_once_per_writer(opened, image):
    recorder = opened()
    body = {"mode": "raw", "temperature": 1.0}
    first = record("contract.declared", kind="logprob", version="1", body=body)
    again = record("contract.declared", kind="logprob", version="1", body=dict(body))
    other = record("contract.declared", kind="logprob", version="2", body=body)
    assert first == again
    assert first.contract_id == fingerprints.contract_id("logprob", "1", body)
    assert other.contract_id != first.contract_id
    assert [e.type for e in image(recorder).events[2:]] == ["contract.declared"] * 2


def test_scopes_nest_and_an_argument_wins(opened, image):
    recorder = opened()
    with scope(step=1, rollout_id=7, labels={"a": "1"}):
        knob()
        with scope(step=2, labels={"b": "2"}):
            knob(step=3, labels={"c": "3"})
        knob()
    knob()
    a, b, c, d = (e.fields for e in image(recorder).events[2:])
    assert (a["step"], a["rollout_id"], a["labels"]) == (1, 7, {"a": "1"})
    assert (b["step"], b["rollout_id"], b["labels"]) == (3, 7, {"a": "1", "b": "2", "c": "3"})
    assert (c["step"], c["labels"]) == (1, {"a": "1"})
    assert "step" not in d


def test_a_scope_belongs_to_its_context(opened, image):
    recorder = opened()
    with scope(step=1):
        threading_seen = threading.Thread(target=knob)
        threading_seen.start()
        threading_seen.join()
        contextvars.copy_context().run(knob)
    steps = [e.fields.get("step") for e in image(recorder).events[2:]]
    assert steps == [None, 1]


def test_a_scope_left_in_another_context_does_not_raise(opened):
    opened()

    def steps():
        with scope(step=1):
            yield

    generator = steps()
    contextvars.copy_context().run(next, generator)
    generator.close()


def test_without_a_url_record_does_nothing():
    assert record("no.such.type", nonsense=1).seq is None
    assert flush("committed", timeout=0) == dict.fromkeys(LEVELS, -1)


def test_rlk_disable_turns_everything_off(monkeypatch, tmp_path):
    monkeypatch.setenv("RLK_DISABLE", "1")
    recorder = init(str(tmp_path / "ledger"), spool=tmp_path / "spool", run_id="../bad")
    assert not recorder.enabled
    assert knob().seq is None
    assert not (tmp_path / "spool").exists()


def test_consistency_off_records_nothing(tmp_path):
    recorder = init(str(tmp_path / "l"), spool=tmp_path / "s", mode={"consistency": "off"})
    assert not recorder.enabled
    assert knob().seq is None


@pytest.mark.parametrize(
    ("event", "fields", "says"),
    [
        ("logprob", {}, "did you mean 'logprobs'"),
        ("knob.applied", {"path": "a", "requested": 1, "statuss": "applied"}, "did you mean 'status'"),
        ("knob.applied", {"path": "a", "requested": 1, "status": "maybe"}, "status"),
        ("knob.applied", {"path": "a", "requested": 1, "status": "applied", "step": True}, "step"),
        ("logprobs", {"sample_id": "s", "source": "rollout", "contract_id": "c"}, "`values` is required"),
        (12, {}, "takes an event type"),
        (KnobApplied, {}, "takes an event type"),
        (KnobApplied(path="a", requested=1, status="applied"), {"step": 1}, "no further fields"),
        ("contract.declared", {"kind": "logprob", "version": "1", "body": {"t": float("nan")}}, "NaN|nan"),
    ],
)
def test_a_malformed_event_raises_one_sentence_under_tests(opened, event, fields, says):
    opened()
    with pytest.raises(ValueError, match=says) as caught:
        record(event, **fields)
    assert "\n" not in str(caught.value)


def test_a_malformed_event_in_production_is_one_warning_and_a_gap(opened, image, caplog):
    recorder = opened(on_error="warn")
    for n in range(3):
        assert record("knob.applied", path="a", requested=n, status="maybe").seq is None
    assert knob().seq is not None
    events = image(recorder).events
    gaps = [e.fields for e in events if e.type == "gap"]
    assert [(g["kind"], g["event_type"]) for g in gaps] == [("rejected", "knob.applied")] * 3
    assert "status" in gaps[0]["reason"]
    assert unaccounted(events) == []
    assert len(caplog.records) == 1


def test_an_internal_error_stays_inside_and_leaves_a_gap(opened, image, caplog, monkeypatch):
    recorder = opened(on_error="warn")

    class Hostile:
        dtype = property(lambda self: 1 / 0)

    assert record("logprobs", sample_id="s", source="rollout", contract_id="c", values=Hostile()).seq is None
    gap = image(recorder).events[-1]
    assert (gap.type, gap.fields["kind"]) == ("gap", "internal")
    assert "ZeroDivisionError" in gap.fields["reason"]
    assert len(caplog.records) == 1


def test_an_internal_error_raises_under_tests_and_still_leaves_a_gap(opened, image):
    recorder = opened()

    class Hostile:
        dtype = property(lambda self: 1 / 0)

    with pytest.raises(ZeroDivisionError):
        record("logprobs", sample_id="s", source="rollout", contract_id="c", values=Hostile())
    assert image(recorder).events[-1].fields["kind"] == "internal"


def test_record_after_close_warns_once(opened, caplog):
    recorder = opened()
    recorder.close()
    for _ in range(3):
        assert recorder.record("knob.applied", path="a", requested=1, status="applied").seq is None
    assert len(caplog.records) == 1


def test_threads_share_one_contiguous_sequence(opened, image):
    recorder = opened()

    def work(lane):
        for n in range(200):
            knob(path=f"{lane}/{n}")

    threads = [threading.Thread(target=work, args=(lane,)) for lane in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    events = image(recorder).events
    assert unaccounted(events) == []
    assert sorted(e.fields["path"] for e in events[2:]) == sorted(f"{a}/{b}" for a in range(6) for b in range(200))
    for lane in range(6):
        mine = [int(e.fields["path"].split("/")[1]) for e in events[2:] if e.fields["path"].startswith(f"{lane}/")]
        assert mine == list(range(200))


def test_a_second_init_closes_the_first_writer(opened, image):
    first = opened()
    second = opened(run_id="r2")
    assert image(first).events[-1].type == "writer.closed"
    assert first.writer_id != second.writer_id
    assert api.current() is second


def test_importing_and_recording_needs_nothing_heavy(tmp_path):
    code = (
        "import sys, rlk_ledger_sdk as r, rlk_ledger_sdk.weights, rlk_ledger_sdk.testing\n"
        f"r.init({str(tmp_path / 'l')!r}, spool={str(tmp_path / 's')!r}, shipper='off')\n"
        "r.record('logprobs', sample_id='s', source='rollout', contract_id='c', values=[-1.0])\n"
        "r.close()\n"
        "print(sorted({'torch','numpy','pyarrow','duckdb','fsspec','click','rich'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]", done.stderr
    assert done.stderr == ""


def test_event_error_is_what_a_caller_catches(opened):
    opened()
    with pytest.raises(EventError):
        record("knob.applied")


def test_numpy_and_torch_scalars_in_free_fields_are_stored_as_numbers(opened, image):
    recorder = opened(job={"lr": np.float32(0.5)})
    knob(actual=np.float32(3.0), materialized={"a": [np.int64(7), torch.tensor(2)]})
    events = image(recorder).events
    assert events[0].fields["job"] == {"lr": 0.5}
    assert (events[-1].fields["actual"], events[-1].fields["materialized"]) == (3.0, {"a": [7, 2]})


def _holds_itself():
    value: dict = {}
    value["x"] = value
    return value


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (2**70, "does not fit 64 bits; use a string"),
        ("\ud800", "lone surrogate"),
        ({"a": object()}, "objects of type object"),
        (_holds_itself(), "holds itself"),
    ],
    ids=["huge", "surrogate", "object", "loop"],
)
def test_what_no_envelope_can_hold_is_refused_by_field_and_is_the_callers_mistake(opened, image, value, why):
    recorder = opened()
    with pytest.raises(EventError, match=f"knob.applied: `actual` .*{why}"):
        knob(actual=value)
    knob()
    assert [(e.type, e.fields.get("kind")) for e in image(recorder).events[2:]] == [("knob.applied", None)]


def test_a_contract_that_json_cannot_hold_is_a_rejected_event_in_production(opened, image):
    recorder = opened(on_error="warn")
    record("contract.declared", kind="logprob", version="1", body={"t": float("nan")})
    gap = image(recorder).events[-1]
    assert (gap.type, gap.fields["kind"]) == ("gap", "rejected")
    assert "`$.body.t` is nan" in gap.fields["reason"]


def test_an_error_that_quotes_something_huge_stays_a_sentence(opened):
    opened()
    with pytest.raises(EventError) as caught:
        record("knob.applied", path="p", requested=1, status="x" * 100_000)
    assert len(str(caught.value)) < 700
    assert str(caught.value).startswith("knob.applied: ")
    assert "at `status`; use one of applied, fallback" in str(caught.value)
