"""The Megatron integration where it must stay out of the way: recording off, a wrong model, no engine at all."""

from types import SimpleNamespace
from typing import Any

import pytest

import rlk_ledger
from rlk_ledger.integrations import megatron
from rlk_ledger_schemas.errors import UsageError
from rlk_ledger_sdk.integrations.megatron import watch as watching
from rlk_ledger_sdk.integrations.megatron.modules import unwrap
from rlk_ledger_sdk.testing import capture


class Untouched:
    """A model that answers every look with a failure."""

    def __getattribute__(self, name: str) -> Any:
        raise AssertionError(f"looked at {name}")


def model(**more: Any) -> Any:
    return SimpleNamespace(config=SimpleNamespace(), decoder=SimpleNamespace(), post_process=True, **more)


def test_off_looks_at_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Claim: without a ledger, attach does not touch the model, and every call of what it returns does nothing."""
    monkeypatch.delenv("RLK_LEDGER", raising=False)
    rlk_ledger.close()
    watch = megatron.attach(Untouched(), "training-0")
    assert isinstance(watch, megatron.Off)
    with watch.scoring("logprob", weight_version="v0", reduce=True) as scored:
        scored.batch(Untouched(), Untouched(), Untouched())
        scored.values(Untouched())
    assert watch.published("v0").seq is None
    assert watch.timed() == watch.profiled(Untouched(), ["x"]) == 0


def test_a_wrong_model_leaves_a_gap_and_the_job_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Claim: in production a mistake at attach is an `internal` gap that says what to pass, and nothing is raised."""
    monkeypatch.setattr(watching, "version", lambda: "0")
    with capture(role="training", on_error="warn") as recorded:
        watch = megatron.attach(SimpleNamespace(), "training-0")
    assert isinstance(watch, megatron.Off)
    (gap,) = [event for event in recorded if event.type == "gap"]
    assert gap.fields["kind"] == "internal"
    assert "is no GPTModel" in gap.fields["reason"]


def test_wrappers_are_stepped_through() -> None:
    """Claim: any wrapping that keeps the model under `module` is looked through, and chunks keep their order."""
    first, last = model(name="first"), model(name="last")
    first.post_process = False
    stage = unwrap([SimpleNamespace(module=SimpleNamespace(module=first)), SimpleNamespace(module=last)])
    assert [chunk.name for chunk in stage.chunks] == ["first", "last"]
    assert len(stage.wrappers) == 2
    assert stage.scoring is last
    assert unwrap(first).scoring is None
    with pytest.raises(UsageError, match="list of model chunks is empty"):
        unwrap([])
