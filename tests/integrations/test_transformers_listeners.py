"""Several listeners of one model: threads, any order of leaving, foreign wrappers, copies of a wrapped model."""

import copy
import pickle
import threading
from pathlib import Path
from typing import Any

import pytest

from rlk_ledger.integrations import transformers as hf
from rlk_ledger_sdk.testing import capture

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

MODEL = Path(__file__).parent.parent.parent / "replay" / "rlk_ledger_replay" / "model"
METHODS = ("generate", "_get_logits_processor")


@pytest.fixture(scope="module")
def loaded() -> Any:
    transformers.utils.logging.disable_progress_bar()
    return transformers.Qwen3ForCausalLM.from_pretrained(str(MODEL), dtype=torch.float32).eval()


@pytest.fixture
def model(loaded: Any) -> Any:
    yield loaded
    left = [name for name in METHODS if name in vars(loaded)]
    for name in left:
        del vars(loaded)[name]
    assert not left, f"{left} were left on the model"


def draw(model: Any, start: int, tokens: int = 4) -> Any:
    ids = torch.tensor([[256, start]])
    fixed = {"do_sample": False, "max_new_tokens": tokens, "pad_token_id": 258, "eos_token_id": -1}
    return model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **fixed)


def starts(heard: list[Any]) -> list[int]:
    return [generation.rows[0].prompt[1] for generation in heard]


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2), (1, 2, 0)])
def test_listeners_leave_in_any_order_and_hear_what_came_before(model: Any, order: tuple[int, ...]) -> None:
    heard: list[list[Any]] = [[], [], []]
    with capture():
        listeners = [hf.Listener(model, one.append, mode) for one, mode in zip(heard, ("processed", "raw", "raw"))]
        for turn, leaving in enumerate(order):
            draw(model, 97 + turn)
            listeners[leaving].detach()
            listeners[leaving].detach()
    for place, one in enumerate(heard):
        assert starts(one) == [97 + turn for turn in range(order.index(place) + 1)]
        assert all(generation.rows[0].logprobs for generation in one)
    draw(model, 97)
    assert [len(one) for one in heard] == [order.index(place) + 1 for place in range(3)]


def test_a_listener_is_no_logits_processor_of_the_others(model: Any) -> None:
    with capture(), hf.listening(model) as outer, hf.listening(model, "raw") as inner:
        draw(model, 97)
    assert [generation.drawn.processors for generation in (*outer, *inner)] == [(), ()]


def test_threads_that_generate_at_once_record_their_own_samples(model: Any) -> None:
    """Both are inside their `generate` at the same moment, and the one that came first leaves first."""
    inside, first_left, drawn = threading.Barrier(2), threading.Event(), {}
    original = type(model)._get_logits_processor

    def meet(self: Any, *args: Any, **kwargs: Any) -> Any:
        inside.wait(30)
        if threading.current_thread().name == "b":
            assert first_left.wait(30)
        return original(self, *args, **kwargs)

    def job(name: str, start: int) -> None:
        watched = hf.attach(model, engine=name)
        drawn[name] = draw_by(watched, name, start)
        if name == "a":
            first_left.set()

    def draw_by(watched: Any, name: str, start: int) -> Any:
        ids = torch.tensor([[256, start]])
        fixed = {"do_sample": False, "max_new_tokens": 4, "pad_token_id": 258, "eos_token_id": -1}
        return watched.generate(input_ids=ids, attention_mask=torch.ones_like(ids), sample_ids=[name], **fixed)

    with capture() as events, pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(model), "_get_logits_processor", meet)
        threads = [threading.Thread(target=job, args=one, name=one[0]) for one in (("a", 97), ("b", 98))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    found = {e.fields["sample_id"]: e.arrays["prompt_token_ids"] for e in events.of("rollout.sample")}
    assert found == {"a": [256, 97], "b": [256, 98]}
    assert len(events.of("logprobs")) == 2


def test_a_wrapper_that_came_later_survives_a_detach(model: Any) -> None:
    heard: list[Any] = []
    with capture():
        listener = hf.Listener(model, heard.append)
        ours, calls = model.generate, []

        def theirs(*args: Any, **kwargs: Any) -> Any:
            calls.append(1)
            return ours(*args, **kwargs)

        model.generate = theirs
        listener.detach()
        want = draw(model, 97)
        assert model.generate is theirs
        again = hf.Listener(model, heard.append)
        assert torch.equal(draw(model, 97), want)
        again.detach()
        assert model.generate is theirs
    assert (len(heard), len(calls)) == (1, 2)
    for name in METHODS:
        vars(model).pop(name, None)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_a_copy_of_a_wrapped_model_generates_with_its_own_weights(model: Any, duplicate: Any) -> None:
    heard: list[Any] = []
    with capture(), torch.no_grad():
        listener = hf.Listener(model, heard.append)
        twin = duplicate(model)
        for parameter in twin.parameters():
            parameter.zero_()
        drawn, own = draw(twin, 97), draw(model, 97)
        listener.detach()
        assert torch.equal(draw(twin, 97), drawn)
    assert drawn[0, 2:].tolist() == [0] * 4, "a model of zeros finds every token equally likely"
    assert not torch.equal(own, drawn)
    assert len(heard) == 1


def test_a_generation_that_fails_leaves_nothing_behind(model: Any) -> None:
    heard: list[Any] = []
    with capture():
        listener = hf.Listener(model, heard.append)
        with pytest.raises(Exception, match="max_new_tokens"):
            draw(model, 97, tokens=-1)
        draw(model, 98)
        listener.detach()
    assert starts(heard) == [98]


@pytest.mark.parametrize("ids", [["one", "too many"], [], None, [3]])
def test_a_generation_recorded_by_hand_under_wrong_ids_costs_the_job_nothing(model: Any, ids: Any) -> None:
    with capture(on_error="warn") as events, hf.listening(model) as heard:
        draw(model, 97)
        hf.attach(model).recorded(heard[0], ids)
    assert events.of("gap")
    hf.attach(model).recorded(object(), ids)  # type: ignore[arg-type]  # off: not even looked at
