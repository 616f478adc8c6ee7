"""declare, read_back and guarded: what every integration stands on."""

import os
from pathlib import Path
from typing import Any

import pytest

import rlk_ledger
from rlk_ledger.recover import recover
from rlk_ledger_sdk.declared import Told, declare
from rlk_ledger_sdk.guard import guarded
from rlk_ledger_sdk.knobs import UNOBSERVABLE, read_back
from rlk_ledger_sdk.testing import Recording, capture


def knobs(events: Recording) -> list[tuple[str, Any, Any, str]]:
    fields = [e.fields for e in events.of("knob.applied")]
    return [(f["path"], f["requested"], f.get("actual"), f["status"]) for f in fields]


def test_a_contract_is_declared_once_and_what_was_not_read_is_left_out() -> None:
    with capture() as events:
        first = declare("logprob", {"mode": "raw", "top_p": None})
        assert declare("logprob", {"mode": "raw"}) == first
    bodies = [e.fields["body"] for e in events.of("contract.declared")]
    assert bodies == [{"mode": "raw"}]


def test_another_writer_is_to_be_told_again_and_only_once() -> None:
    with capture():
        told = Told()
        assert not told.to_another()
    assert not told.to_another()  # nobody records
    with capture():
        assert [told.to_another() for _ in range(3)] == [True, False, False]


def test_a_forked_child_is_another_writer_and_hears_a_contract_once(tmp_path: Path) -> None:
    where = {"run_id": "r", "role": "rollout", "spool": tmp_path / "s", "shipper": "off"}
    rlk_ledger.init(tmp_path / "l", **where)
    told = Told()
    mine = declare("logprob", {"mode": "raw"})
    child = os.fork()
    if not child:
        right = [told.to_another() for _ in range(2)] == [True, False]
        theirs = [declare("logprob", {"mode": "raw"}) for _ in range(2)]
        os._exit(0 if right and theirs == [mine, mine] else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    rlk_ledger.close(timeout=0)
    recover(tmp_path / "s")
    found = [w for w, _, _, _ in rlk_ledger.open(tmp_path / "l").read_events("r", types=["contract.declared"])]
    assert len(found) == len(set(found)) == 2


@pytest.mark.parametrize(
    ("requested", "actual", "status"),
    [(True, True, "applied"), (True, False, "fallback"), ("auto", "sdpa", "applied"), (None, 3, "applied")],
)
def test_the_status_of_a_setting_follows_from_its_values(requested: Any, actual: Any, status: str) -> None:
    with capture() as events:
        read_back("a.b", requested=requested, actual=actual, evidence="e", lifecycle="engine")
    assert knobs(events)[0][3] == status


def test_a_setting_that_shows_nowhere_is_unobservable_not_applied() -> None:
    with capture() as events:
        read_back("a.b", requested=True, actual=UNOBSERVABLE, evidence="no accessor", lifecycle="engine")
    assert knobs(events) == [("a.b", True, None, "unobservable")]


def test_a_mistake_of_an_integration_stays_out_of_the_job(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rlk_ledger.init(tmp_path / "l", run_id="r", role="rollout", spool=tmp_path / "s", shipper="inline", on_error="warn")
    for _ in range(3):
        with guarded("vllm outputs"):
            raise KeyError("logprobs")
    rlk_ledger.close()
    assert caplog.text.count("vllm outputs") == 1
    gaps = [e for _, _, e, _ in rlk_ledger.open(tmp_path / "l").read_events("r", types=["gap"])]
    assert sum(g["last"] - g["first"] + 1 for g in gaps) == 3
    assert {g["kind"] for g in gaps} == {"internal"}


def test_under_tests_a_mistake_is_raised() -> None:
    with capture(), pytest.raises(KeyError), guarded("vllm outputs"):
        raise KeyError("logprobs")


def test_a_contract_is_declared_again_by_another_writer_and_by_a_forked_child(tmp_path: Path) -> None:
    body = {"mode": "raw", "temperature": 1.0}
    for _ in range(2):
        with capture() as events:
            first = declare("logprob", body)
            assert declare("logprob", body) == first
            assert declare("logprob", {**body, "temperature": True}) != first, "1.0 and true are not one value"
        assert len(events.of("contract.declared")) == 2
    rlk_ledger.init(tmp_path / "l", run_id="r", role="rollout", spool=tmp_path / "s", shipper="off")
    declare("logprob", body)
    child = os.fork()
    if child == 0:
        declare("logprob", body)
        os._exit(0)
    os.waitpid(child, 0)
    rlk_ledger.close()
    recover(tmp_path / "s")
    events_ = rlk_ledger.open(tmp_path / "l").read_events("r", types=["contract.declared"])
    assert len({writer for writer, _, _, _ in events_}) == 2
