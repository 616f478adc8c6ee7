"""The demo's engines compute what they declare, and each fault is really in the arithmetic."""

import math
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import torch

from rlk_ledger_replay.demo.decode import Request, generate
from rlk_ledger_replay.demo.exchange import ExchangeTimeout, Rolled, RolledStep, put, take, wait_for
from rlk_ledger_replay.demo.faults import FAULTS
from rlk_ledger_replay.demo.learn import Learner, Lesson, advantages, clipped_loss
from rlk_ledger_replay.demo.network import copy_weights, held_tensors, open_network, save_weights
from rlk_ledger_replay.demo.score import micro_batches, score
from rlk_ledger_replay.demo.settings import Numerics, Settings, read_settings, write_settings
from rlk_ledger_replay.demo.tasks import BEGIN, TASKS, Task, reward, tasks_of
from rlk_ledger_schemas.errors import UsageError

MODEL = str(resources.files("rlk_ledger_replay") / "model")
HONEST = Numerics(0.7, "float32")
TOOL = Task("tool", "def f(x):\n", 12, "# 42\n", 5)


@pytest.fixture(scope="module")
def network() -> Any:
    return open_network(MODEL)


def rolled(request: Request, reward_: float = 0.0) -> Rolled:
    values = [None if math.isnan(v) else v for v in request.logprobs]
    return Rolled(
        request.sample_id, request.group_id, request.task.prompt, request.tokens, request.loss_mask, values, reward_
    )


def sampled(network: Any, tasks: list[Task], numerics: Numerics = HONEST) -> list[Request]:
    requests = [Request(task, f"s{i}", "g") for i, task in enumerate(tasks)]
    generate(network, requests, numerics, torch.Generator().manual_seed(3))
    return requests


def difference(requests: list[Request], values: list[torch.Tensor]) -> torch.Tensor:
    """Training minus rollout over sampled tokens."""
    pairs = zip(requests, values)
    return torch.cat([(t.double() - torch.tensor(r.logprobs))[torch.tensor(r.loss_mask).bool()] for r, t in pairs])


def test_decoding_and_scoring_agree_to_bf16_noise(network: Any) -> None:
    """Left padding, cache, shrinking batches and inserted tokens leave each value what a full forward gives."""
    requests = sampled(network, [TASKS[0], TOOL, TASKS[5], TASKS[3], TASKS[1]])
    for batch in (1, 2, 5):
        values = [
            v for part in micro_batches(requests, batch) for v in score(network, [rolled(r) for r in part], HONEST)
        ]
        d = difference(requests, values)
        assert d.abs().mean() < 0.02
        assert d.abs().max() < 0.4


def test_inserted_tokens_are_masked_and_have_no_value(network: Any) -> None:
    (request,) = sampled(network, [TOOL])
    at = TOOL.tool_after
    end = at + len(TOOL.tool_tokens)
    assert request.tokens[at:end] == TOOL.tool_tokens
    assert request.loss_mask == [1] * at + [0] * (end - at) + [1] * (len(request.tokens) - end)
    assert [math.isnan(v) for v in request.logprobs] == [mask == 0 for mask in request.loss_mask]
    assert sum(request.loss_mask) == TOOL.sampled or request.finish_reason == "stop"


def test_generation_depends_on_the_seed_alone(network: Any) -> None:
    first, second = (sampled(network, [TASKS[0], TASKS[1]]) for _ in range(2))
    assert [r.tokens for r in first] == [r.tokens for r in second]
    assert [r.logprobs for r in first] == [r.logprobs for r in second]


def test_a_late_slice_gives_each_token_its_successors_value(network: Any) -> None:
    requests = sampled(network, [TASKS[1], TASKS[5]])
    samples = [rolled(r) for r in requests]
    late = score(network, samples, Numerics(0.7, "float32", lag=1))
    for right, wrong in zip(score(network, samples, HONEST), late):
        assert torch.equal(right[1:], wrong[:-1])


def test_temperature_one_scores_another_distribution(network: Any) -> None:
    requests = sampled(network, [TASKS[0]] * 4)
    d = difference(requests, score(network, [rolled(r) for r in requests], Numerics(1.0, "float32")))
    assert d.abs().mean() > 0.1


def test_a_bf16_head_only_gives_bf16_values(network: Any) -> None:
    (request,) = sampled(network, [TASKS[0]], Numerics(0.7, "bfloat16"))
    values = torch.tensor(request.logprobs)
    assert torch.equal(values, values.bfloat16().float())
    (exact,) = sampled(network, [TASKS[0]])
    assert not torch.equal(torch.tensor(exact.logprobs), torch.tensor(exact.logprobs).bfloat16().float())


def test_weights_travel_through_the_folder_bit_for_bit(tmp_path: Path) -> None:
    source, target = open_network(MODEL), open_network(MODEL)
    with torch.no_grad():
        for p in source.parameters():
            p.add_(torch.randn_like(p) * 0.01)
    save_weights(source, Path(MODEL), tmp_path / "v1")
    copy_weights(target, tmp_path / "v1")
    assert all(torch.equal(held_tensors(source)[n], t) for n, t in held_tensors(target).items())
    assert torch.equal(target.lm_head.weight, target.model.embed_tokens.weight)
    assert [p.name for p in tmp_path.iterdir()] == ["v1"]


def test_an_update_raises_the_probability_of_rewarded_samples(tmp_path: Path) -> None:
    network = open_network(MODEL)
    settings = Settings(root=str(tmp_path), run_id="r", model=MODEL, spool=str(tmp_path / "spool"))
    requests = sampled(network, [TASKS[1]] * 4)
    samples = [rolled(r, reward_=float(i % 2)) for i, r in enumerate(requests)]
    gains = advantages(samples)
    before = score(network, samples, HONEST)
    lessons = [Lesson(s, b, torch.tensor(s.loss_mask).float(), g) for s, b, g in zip(samples, before, gains)]
    learner = Learner(network, settings, HONEST)
    first = learner.update(lessons)
    assert first.clipped == 0.0
    assert first.gradient_norm > 0.0
    moved = [float((a - b).sum()) * g for a, b, g in zip(score(network, samples, HONEST), before, gains)]
    assert sum(moved) > 0.0


def test_the_clip_stops_the_gradient_where_the_gain_would_grow() -> None:
    sample = Rolled("s", "g", [BEGIN], [65, 66, 67], [1, 1, 0], [-1.0, -1.0, None], 1.0)
    lesson = Lesson(sample, torch.tensor([-1.0, -1.0, -1.0]), torch.tensor([1.0, 1.0, 0.0]), advantage=1.0)
    now = torch.tensor([-0.5, -1.5, -0.2], requires_grad=True)
    loss, clipped = clipped_loss(now, lesson, 0.2)
    (gradient,) = torch.autograd.grad(loss, now)
    assert clipped == 2.0
    assert gradient[0] == 0.0
    assert gradient[1] == pytest.approx(-math.exp(-0.5))
    assert gradient[2] == 0.0


def test_advantages_are_centred_within_groups() -> None:
    samples = [Rolled(str(i), "ab"[i % 2], [BEGIN], [65], [1], [-1.0], float(i)) for i in range(8)]
    gains = advantages(samples)
    for group in (0, 1):
        assert sum(gains[group::2]) == pytest.approx(0.0, abs=1e-9)
    same = advantages([Rolled(str(i), "g", [BEGIN], [65], [1], [-1.0], 0.5) for i in range(4)])
    assert same == [0.0] * 4


def test_reward_counts_sampled_tokens_only() -> None:
    assert reward([97, 98, 32, 97], [1, 1, 1, 0]) == pytest.approx(2 / 3)
    assert reward([97], [0]) == 0.0


def test_each_step_has_distinct_tasks() -> None:
    for step in range(4):
        names = [task.prompt_id for task in tasks_of(step, 8)]
        assert len(set(names)) == 8
    assert any(task.tool for task in TASKS)
    assert all(task.tool_after < task.sampled for task in TASKS)


def test_a_step_survives_the_exchange(tmp_path: Path) -> None:
    step = RolledStep(1, 1, [Rolled("s", "g", [BEGIN], [65, 66], [1, 0], [-0.1234567, None], 0.5)])
    put(tmp_path / "samples" / "x.json", step)
    assert take(tmp_path / "samples" / "x.json", 1.0) == step
    assert [p.name for p in (tmp_path / "samples").iterdir()] == ["x.json"]


def test_waiting_ends_with_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(ExchangeTimeout, match="did not appear within 0 s"):
        wait_for(tmp_path / "never", 0)


@pytest.mark.parametrize("fault", [None, *FAULTS])
def test_a_fault_changes_its_own_side_only(tmp_path: Path, fault: str | None) -> None:
    settings = Settings(root=str(tmp_path), run_id="r", model=MODEL, spool=str(tmp_path / "spool"), fault=fault)
    for side in ("rollout", "training"):
        if fault is None or FAULTS[fault].side != side:
            assert settings.numerics(side) == HONEST


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"fault": "nonsense"}, "unknown fault 'nonsense'; choose one of bf16-head"),
        ({"steps": 0}, "steps is 0; choose 1 to"),
        ({"seed": -1}, "seed is -1; choose 0 to"),
        ({"groups": 7}, "a step has 28"),
    ],
)
def test_bad_settings_say_what_to_choose(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        Settings(root=str(tmp_path), run_id="r", model=MODEL, spool=str(tmp_path / "spool"), **change)


def test_settings_survive_their_file(tmp_path: Path) -> None:
    settings = Settings(
        root=str(tmp_path), run_id="r", model=MODEL, spool=str(tmp_path / "spool"), fault="tool-tokens", steps=2
    )
    assert read_settings(write_settings(settings)) == settings
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(UsageError, match=r"bad\.json does not hold demo settings"):
        read_settings(tmp_path / "bad.json")
