"""testing.capture(): what users write their own tests with."""

import pytest

from rlk_ledger_schemas.errors import ConfigError, EventError
from rlk_ledger_sdk import api, record, scope
from rlk_ledger_sdk.testing import Recorded, capture, read_spool, unaccounted


def test_capture_shows_fields_and_arrays_and_puts_the_recorder_back(opened):
    recorder = opened()
    with capture() as events, scope(step=3):
        record("logprobs", sample_id="s", source="training", contract_id="c", values=[-1.0, -0.5])
        record("knob.applied", path="a", requested=1, status="applied")
    (event,) = events.of("logprobs")
    assert event.fields == {"sample_id": "s", "source": "training", "contract_id": "c", "step": 3}
    assert event.arrays == {"values": [-1.0, -0.5]}
    assert [e.type for e in events] == ["logprobs", "knob.applied"]
    assert api.current() is recorder
    assert len(read_spool(recorder.directory).events) == 2


def test_capture_needs_no_configuration_and_writes_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("RLK_SPOOL", str(tmp_path / "spool"))
    with capture(role="rollout") as events:
        record("knob.applied", path="a", requested=1, status="applied")
    assert len(events) == 1
    assert not (tmp_path / "spool").exists()
    assert record("knob.applied").seq is None


def test_a_malformed_event_raises_inside_capture():
    with capture(), pytest.raises(EventError, match="no field 'x'"):
        record("knob.applied", path="a", requested=1, status="applied", x=1)


def test_a_misspelt_option_of_capture_is_named():
    with pytest.raises(ConfigError, match="did you mean 'role'"), capture(rol="rollout"):
        pass


def test_unaccounted_notices_holes_and_double_claims():
    def event(seq, kind="knob.applied", **fields):
        return Recorded(kind, seq, fields, {})

    assert unaccounted([]) == []
    assert unaccounted([event(0), event(1)]) == []
    assert unaccounted([event(0), event(2)]) == [1]
    assert unaccounted([event(0), event(0)]) == [0]
    assert unaccounted([event(0), event(3, "gap", first=1, last=2)]) == []
    assert unaccounted([event(0), event(2, "gap", first=0, last=1)]) == [0]
