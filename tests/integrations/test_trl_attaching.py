"""Attaching to a trainer and leaving it again, on a stand-in with the methods and callbacks of TRL's GRPOTrainer."""

from types import SimpleNamespace
from typing import Any

import pytest

from rlk_ledger.integrations.trl import attach_trainer
from rlk_ledger_schemas.errors import UsageError
from rlk_ledger_sdk.integrations.trl import trainer as module
from rlk_ledger_sdk.testing import capture

METHODS = ("_generate_and_score_completions", "_get_per_token_logps_and_entropies", "compute_loss")


class Trainer:
    """What attach_trainer stands on, without a model."""

    def __init__(self) -> None:
        self.model = SimpleNamespace(training=True)
        self.args = SimpleNamespace(num_generations=4)
        self.callbacks: list[Any] = []
        self.calls: list[str] = []

    def add_callback(self, callback: Any) -> None:
        self.callbacks.append(callback)

    def remove_callback(self, callback: Any) -> None:
        self.callbacks.remove(callback)

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        self.calls.append("generate")
        return inputs

    def _get_per_token_logps_and_entropies(self, *args: Any) -> Any:
        return args

    def compute_loss(self, model: Any, inputs: Any) -> Any:
        self.calls.append("loss")
        return inputs


@pytest.fixture
def one(monkeypatch: pytest.MonkeyPatch) -> Trainer:
    """A trainer whose model has nothing to read back."""

    class Attached:
        def __init__(self, model: Any, engine: Any) -> None:
            self.on = True

        def once(self, say: Any) -> None:
            say()

    monkeypatch.setattr(module, "attach", lambda model, engine, requested: Attached(model, engine))
    monkeypatch.setattr(module, "trainer_callback", lambda attached, every: object())
    return Trainer()


def test_detaching_puts_back_what_was_there_and_takes_the_callback_off(one: Trainer) -> None:
    own = one.compute_loss = one.compute_loss  # type: ignore[method-assign]  # a wrapper of the job's own
    with capture():
        handle = attach_trainer(one)
        assert set(METHODS) <= vars(one).keys()
        assert len(one.callbacks) == 1
        for _ in range(2):
            handle.detach()
    assert vars(one)["compute_loss"] is own
    assert not {"_generate_and_score_completions", "_get_per_token_logps_and_entropies"} & vars(one).keys()
    assert one.callbacks == []


def test_a_second_attach_is_the_first(one: Trainer) -> None:
    with capture():
        first = attach_trainer(one)
        assert attach_trainer(one) is first
        first.detach()
        again = attach_trainer(one)
        assert again is not first
        assert len(one.callbacks) == 1
        again.detach()


def test_a_wrapper_that_came_later_stays_and_ours_below_it_only_passes_on(one: Trainer) -> None:
    with capture() as events:
        handle = attach_trainer(one)
        ours = one._generate_and_score_completions
        one._generate_and_score_completions = theirs = lambda inputs: ours(inputs)  # type: ignore[method-assign]
        handle.detach()
        assert one._generate_and_score_completions is theirs
        assert "compute_loss" not in vars(one)
        count = len(list(events))
        assert one._generate_and_score_completions({"a": 1}) == {"a": 1}
        assert one.calls == ["generate"]
        assert len(list(events)) == count


def test_off_is_not_even_a_look_and_on_refuses_an_unknown_trainer() -> None:
    attach_trainer(object()).detach()
    one = Trainer()
    attach_trainer(one).detach()
    assert not set(METHODS) & vars(one).keys()
    assert one.callbacks == []
    with capture(), pytest.raises(UsageError, match="has no _generate_and_score_completions"):
        attach_trainer(object())
