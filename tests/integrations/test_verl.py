"""verl's trainer and its batches on stand-ins built from verl 0.9.1: batch -> recorder -> ledger -> audit."""

import logging
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import rlk_ledger
from rlk_ledger.audit import AuditResult, audit
from rlk_ledger.history import History, load_history
from rlk_ledger.integrations.verl import install, ledgered, record_old_log_probs, record_rollout
from rlk_ledger_sdk.integrations import opening
from rlk_ledger_sdk.testing import capture

VOCAB = 64
NOISE = 0.01

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test decides anew whether its process records."""
    for name in list(os.environ):
        if name.startswith("RLK_") or name in ("WORLD_SIZE", "RANK"):
            monkeypatch.delenv(name)
    monkeypatch.setattr(opening, "_decided", set())


@dataclass
class DataProto:
    """verl.protocol.DataProto: tensors, objects, meta."""

    batch: dict[str, Any] = field(default_factory=dict)
    non_tensor_batch: dict[str, Any] = field(default_factory=dict)
    meta_info: dict[str, Any] = field(default_factory=dict)

    def reorder(self, order: torch.Tensor) -> None:
        """_balance_batch: rows change places in every column."""
        self.batch = {k: v[order] for k, v in self.batch.items()}
        self.non_tensor_batch = {k: v[order.numpy()] for k, v in self.non_tensor_batch.items()}


@dataclass
class KVBatchMeta:
    """transfer_queue.KVBatchMeta: keys and tags; the columns are in the queue."""

    keys: list[str]
    tags: list[dict[str, Any]]
    partition_id: str = "train"
    fields: list[str] | None = None
    extra_info: dict[str, Any] = field(default_factory=dict)


def config(**rollout: Any) -> Any:
    """The parts of verl's configuration that decide what a log-probability is."""
    given = {"name": "vllm", "temperature": 0.7, "top_p": 1.0, "top_k": -1, "n": 4}
    given |= {"logprobs_mode": "processed_logprobs", "calculate_log_probs": True, **rollout}
    actor = {"strategy": "fsdp2", "fsdp_config": {"dtype": "bfloat16"}}
    ref = {"rollout": given, "actor": actor, "model": {"path": "/models/toy"}}
    return {"actor_rollout_ref": ref, "algorithm": {"rollout_correction": None}}


def log_table(version: int, temperature: float) -> np.ndarray:
    """float64[VOCAB, VOCAB]: log-probabilities of the next token given the last, under a weight version."""
    logits = np.random.default_rng(1000 + version).standard_normal((VOCAB, VOCAB)) / temperature
    return logits - np.logaddexp.reduce(logits, axis=1, keepdims=True)


def trajectories(step: int, scores: float = 0.7, prompts: int = 4, each: int = 4) -> list[dict[str, Any]]:
    """What agent loops return: prompt, response with tool tokens in the middle, mask, log-probabilities (0.0 there)."""
    rng, out = np.random.default_rng(step), []
    drawn, said = log_table(step - 1, 0.7), log_table(step - 1, scores)
    for p in range(prompts):
        for k in range(each):
            length = 18 + int(rng.integers(0, 8))
            tokens, mask, values = [], [], []
            last = 3 + p
            for at in range(length):
                tool = 8 <= at < 12
                token = 5 if tool else int(rng.choice(VOCAB, p=np.exp(drawn[last]) / np.exp(drawn[last]).sum()))
                tokens.append(token)
                mask.append(0 if tool else 1)
                values.append(0.0 if tool else float(min(said[last, token] + NOISE * rng.standard_normal(), -1e-6)))
                last = token
            row = {"prompt": [1, 2, 3 + p][-3 + p % 2 :], "response": tokens, "mask": mask, "values": values}
            out.append({**row, "uid": f"u{step}-{p}", "session": k, "step": step - 1, "score": float(k)})
    return out


def padded(rows: list[dict[str, Any]], versions: bool = True) -> DataProto:
    """A legacy batch: prompts padded left, responses right."""
    wide, long = max(len(r["prompt"]) for r in rows), max(len(r["response"]) for r in rows)

    def right(name: str, dtype: Any) -> torch.Tensor:
        return torch.tensor([r[name] + [0] * (long - len(r[name])) for r in rows], dtype=dtype)

    seen = [
        [0] * (wide - len(r["prompt"]))
        + [1] * (len(r["prompt"]) + len(r["response"]))
        + [0] * (long - len(r["response"]))
        for r in rows
    ]
    batch = {
        "prompts": torch.tensor([[0] * (wide - len(r["prompt"])) + r["prompt"] for r in rows]),
        "responses": right("response", torch.long),
        "response_mask": right("mask", torch.long),
        "rollout_log_probs": right("values", torch.float32),
        "attention_mask": torch.tensor(seen),
        "rm_scores": torch.tensor([[0.0] * (long - 1) + [r["score"]] for r in rows]),
    }
    objects = {"uid": np.array([r["uid"] for r in rows], dtype=object)}
    if versions:
        for name in ("min_global_steps", "max_global_steps"):
            objects[name] = np.array([r["step"] for r in rows], dtype=object)
    return DataProto(batch, objects, {"temperature": 0.7})


def scored(rows: list[dict[str, Any]], version: int, temperature: float = 0.7) -> list[torch.Tensor]:
    """What the trainer recomputes: one float32 tensor a sample."""
    table = log_table(version, temperature)
    out = []
    for r in rows:
        ids = np.array([r["prompt"][-1], *r["response"]])
        out.append(torch.tensor(table[ids[:-1], ids[1:]], dtype=torch.float32))
    return out


def pad(values: list[torch.Tensor]) -> torch.Tensor:
    return torch.nn.utils.rnn.pad_sequence(values, batch_first=True)


class LegacyTrainer:
    """RayPPOTrainer as far as the step goes: fit() computes old_log_probs and then joins them to the batch."""

    def __init__(self, config: Any, temperature: float = 0.7) -> None:
        self.config, self.global_steps, self.temperature = config, 0, temperature

    def step(self, rows: list[dict[str, Any]], change: Callable[[DataProto], None] | None = None) -> Any:
        self.global_steps += 1
        self.rows = rows
        data = padded(rows)
        if change is not None:
            change(data)
        scores, _mfu = self._compute_old_log_prob(data)
        return scores

    def _compute_old_log_prob(self, batch: DataProto) -> tuple[DataProto, float]:
        old = pad(scored(self.rows, self.global_steps - 1, self.temperature))
        return DataProto({"old_log_probs": old, "entropys": torch.ones_like(old)}), 0.5


class Queue(ModuleType):
    """transfer_queue: columns by key, nested when they are fetched."""

    def __init__(self) -> None:
        super().__init__("transfer_queue")
        self.held: dict[str, dict[str, Any]] = {}

    def kv_batch_get(self, keys: list[str], partition_id: str, select_fields: list[str]) -> dict[str, Any]:
        out: dict[str, Any] = {}
        for name in select_fields:
            column = [self.held[key].get(name) for key in keys]
            if all(torch.is_tensor(value) for value in column):
                out[name] = torch.nested.as_nested_tensor(column, layout=torch.jagged)
            elif all(value is not None for value in column):
                out[name] = SimpleNamespace(tolist=lambda column=column: list(column))
        return out


class V1Trainer:
    """PPOTrainer of v1: the batch is keys and tags, everything else is in the queue."""

    trainer_mode = "sync"

    def __init__(self, config: Any, temperature: float = 0.7) -> None:
        self.config, self.temperature = config, temperature
        self.global_steps = self.local_trigger_step = 0

    def step(self, rows: list[dict[str, Any]], padding: int = 0, steps: tuple[int, int] | None = None) -> KVBatchMeta:
        self.global_steps += 1
        self.rows = rows
        held, keys, tags = sys.modules["transfer_queue"].held, [], []  # type: ignore[attr-defined]
        for i, r in enumerate([*rows, *rows[:padding]]):
            extra = i >= len(rows)
            key = f"{r['uid']}_{r['session']}_0" + ("_pad" if extra else "")
            held[key] = {
                "prompts": torch.tensor(r["prompt"]),
                "responses": torch.tensor(r["response"]),
                "response_mask": torch.tensor(r["mask"]) * (0 if extra else 1),
                "rollout_log_probs": torch.tensor(r["values"], dtype=torch.float32),
                "uid": r["uid"],
                "rm_scores": torch.tensor([0.0] * (len(r["response"]) - 1) + [r["score"]]),
            }
            first, last = steps or (r["step"], r["step"])
            keys.append(key)
            tags.append({"min_global_steps": first, "max_global_steps": last, "is_padding": extra})
        return self._compute_old_log_prob(KVBatchMeta(keys, tags), metrics={})

    def _compute_old_log_prob(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        held = sys.modules["transfer_queue"].held  # type: ignore[attr-defined]
        values = scored(self.rows, self.global_steps - 1, self.temperature)
        for key, value in zip(batch.keys, [*values, *values]):
            held[key]["old_log_probs"] = value
            held[key]["entropy"] = torch.ones_like(value)
        batch.fields = None
        return batch


@pytest.fixture
def queue(monkeypatch: pytest.MonkeyPatch) -> Queue:
    held = Queue()
    monkeypatch.setitem(sys.modules, "transfer_queue", held)
    return held


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Path]:
    where = {"spool": tmp_path / "spool", "shipper": "inline"}
    rlk_ledger.init(tmp_path / "ledger", run_id="r", role="training", roles={"training": 1}, **where)
    yield tmp_path / "ledger"
    rlk_ledger.close()


def history(ledger: Path) -> History:
    rlk_ledger.close()
    return load_history(rlk_ledger.open(ledger), "r")


def found(result: AuditResult) -> set[str]:
    return {f.finding_id for f in result.findings if f.severity != "info"}


@pytest.mark.parametrize("kind", [LegacyTrainer, V1Trainer])
def test_a_clean_job_passes_its_audit(kind: Any, ledger: Path, queue: Queue) -> None:
    trainer = ledgered(kind)(config())
    for step in (1, 2, 3):
        trainer.step(trajectories(step))
    held = history(ledger)
    result = audit(held)
    assert found(result) == set()
    assert result.verdict == "pass"
    assert len(held.samples) == 48
    assert {s.weight_spans[0][0] for s in held.samples if s.step == 3} == {"2"}
    assert {s.weight_version for s in held.scores if s.step == 3 and s.source == "training"} == {"2"}
    first = next(s for s in held.samples if s.step == 1)
    assert first.prompt_token_ids is not None
    assert (first.prompt_token_ids.tolist(), first.reward) == ([1, 2, 3], 0.0)
    assert all(len(s) == len(s.response_token_ids) for s in held.samples), "padding is no token"
    codes = next(s for s in held.scores if s.source == "rollout").value_class
    assert codes is not None
    assert [i for i, c in enumerate(codes) if c] == [8, 9, 10, 11], "tool tokens were never scored by the engine"


def unmask(data: DataProto) -> None:
    data.batch["response_mask"] = data.batch["attention_mask"][:, -data.batch["responses"].shape[1] :]


def zero_fill(data: DataProto) -> None:
    data.batch["rollout_log_probs"][:, ::3] = 0.0


def shifted(data: DataProto) -> None:
    data.batch["rollout_log_probs"] = data.batch["rollout_log_probs"].roll(1, dims=1)


def test_a_temperature_that_is_not_applied_is_named(ledger: Path) -> None:
    trainer = ledgered(LegacyTrainer)(config(), temperature=1.0)
    for step in (1, 2, 3):
        trainer.step(trajectories(step))
    assert "contract.differs" in found(audit(history(ledger)))


@pytest.mark.parametrize(("change", "finding"), [(zero_fill, "values.defaulted"), (shifted, "alignment.shift")])
def test_values_that_are_no_measurements_are_named(ledger: Path, change: Any, finding: str) -> None:
    trainer = ledgered(LegacyTrainer)(config())
    for step in (1, 2, 3):
        trainer.step(trajectories(step), change)
    result = audit(history(ledger))
    assert finding in found(result)
    assert result.verdict in ("fail", "not_comparable")


@pytest.mark.parametrize(("column", "finding"), [("response_mask", "mask.differs"), ("responses", "tokens.differ")])
def test_a_batch_that_changes_between_the_sides_is_named(ledger: Path, column: str, finding: str) -> None:
    for step in (1, 2):
        rows = trajectories(step)
        data = padded(rows)
        record_rollout(data, config=config(), step=step)
        data.reorder(torch.tensor([3, 1, 2, 0, *range(4, 16)]))
        if column == "response_mask":
            unmask(data)
        else:
            data.batch["responses"] = data.batch["responses"].clone()
            data.batch["responses"][:, 4] = (data.batch["responses"][:, 4] + 1) % VOCAB
        data.batch["old_log_probs"] = pad(scored([rows[i] for i in [3, 1, 2, 0, *range(4, 16)]], step - 1))
        record_old_log_probs(data, config=config(), step=step, weight_version=step - 1)
    assert finding in found(audit(history(ledger)))


def test_a_reordered_batch_finds_its_samples_again(ledger: Path) -> None:
    rows = trajectories(1)
    data = padded(rows)
    record_rollout(data, config=config(), step=1)
    order = torch.randperm(16, generator=torch.Generator().manual_seed(0))
    data.reorder(order)
    shuffled = [rows[i] for i in order.tolist()]
    data.batch["old_log_probs"] = pad(scored(shuffled, 0))
    data.batch["ref_log_prob"] = data.batch["old_log_probs"] - 0.1
    record_old_log_probs(data, config=config(), step=1, weight_version="0")
    record_old_log_probs(data, config=config(), step=1, field="ref_log_prob", source="reference")
    held = history(ledger)
    assert found(audit(held)) == set()
    tokens = {s.sample_id: s.token_digest for s in held.samples}
    assert all(tokens[s.sample_id] == s.token_digest for s in held.scores if s.source != "rollout")
    assert sum(s.source == "reference" for s in held.scores) == 16


def test_raw_log_probabilities_are_declared_and_named(ledger: Path) -> None:
    trainer = ledgered(LegacyTrainer)(config(logprobs_mode="raw_logprobs"))
    for step in (1, 2):
        trainer.step(trajectories(step, scores=1.0))
    result = audit(history(ledger))
    assert "contract.differs" in found(result)
    assert "mode" in {f.where.get("field") for f in result.findings} or result.verdict == "not_comparable"


def test_sglang_values_include_the_temperature_and_no_filter() -> None:
    with capture(role="training") as events:
        record_rollout(padded(trajectories(1)), config=config(name="sglang", top_p=0.9))
    (declared,) = events.of("contract.declared")
    assert declared.fields["body"]["mode"] == "processed"
    assert "top_p" not in declared.fields["body"]


def test_padding_samples_of_the_v1_trainer_are_not_samples(ledger: Path, queue: Queue) -> None:
    ledgered(V1Trainer)(config()).step(trajectories(1), padding=3)
    held = history(ledger)
    assert len(held.samples) == 16
    assert not any(s.sample_id.endswith("_pad") for s in held.samples)
    assert not any(s.sample_id.endswith("_pad") for s in held.scores)


def test_a_response_under_two_versions_has_no_span_and_the_audit_says_so(ledger: Path, queue: Queue) -> None:
    ledgered(V1Trainer)(config()).step(trajectories(1), steps=(0, 1))
    held = history(ledger)
    assert all(not s.weight_spans and s.metadata_source["weight_spans"] == "absent" for s in held.samples)
    assert found(audit(held)) == {"evidence.incomplete"}


@pytest.mark.parametrize(
    ("state", "version"),
    [
        ({"global_steps": 5}, "4"),
        ({"global_steps": 5, "local_trigger_step": 2}, "4+2"),
        ({"global_steps": 5, "local_trigger_step": 2, "trainer_mode": "separate_async"}, "4"),
        ({"global_steps": 9, "local_trigger_step": 3, "current_param_version": 6}, "6"),
        ({}, None),
    ],
)
def test_the_weights_of_the_old_log_probabilities_have_the_engines_name(state: Any, version: str | None) -> None:
    from rlk_ledger_sdk.integrations.verl.trainer import version_in_force

    assert version_in_force(SimpleNamespace(**state)) == version


def test_in_bypass_mode_training_scored_nothing_and_nothing_is_claimed(ledger: Path) -> None:
    job = config()
    job["algorithm"]["rollout_correction"] = {"bypass_mode": True}
    ledgered(LegacyTrainer)(job).step(trajectories(1))
    assert history(ledger).scores == []


def test_off_the_trainer_computes_and_keeps_what_it_did_before() -> None:
    rows = trajectories(1)
    bare, watched = LegacyTrainer(config()), ledgered(LegacyTrainer)(config())
    assert torch.equal(bare.step(rows).batch["old_log_probs"], watched.step(rows).batch["old_log_probs"])
    assert type(watched).__name__ == "LegacyTrainer"
    assert isinstance(watched, LegacyTrainer)


def test_install_wraps_every_registered_trainer_once(monkeypatch: pytest.MonkeyPatch) -> None:
    base = ModuleType("verl.trainer.ppo.v1.trainer_base")
    base.TRAINER_REGISTRY = {"sync": V1Trainer}  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "verl.trainer.ppo.v1.trainer_base", base)
    monkeypatch.setitem(sys.modules, "verl.trainer.ppo.v1", ModuleType("verl.trainer.ppo.v1"))
    assert install() == ["sync"]
    first = base.TRAINER_REGISTRY["sync"]  # type: ignore[attr-defined]
    assert issubclass(first, V1Trainer)
    assert first is not V1Trainer
    install()
    assert base.TRAINER_REGISTRY["sync"] is first  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"responses": None}, "no `responses`"),
        ({"rollout_log_probs": torch.zeros(3, 20)}, "rollout_log_probs has 3 rows for 16 samples"),
        ({"rollout_log_probs": torch.zeros(16, 4)}, "has 4 values for"),
        ({"response_mask": torch.full((16, 40), 7)}, "loss_mask"),
    ],
)
def test_a_malformed_batch_is_one_sentence_and_never_an_exception(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, change: dict[str, Any], sentence: str
) -> None:
    where = {"spool": tmp_path / "s", "shipper": "inline", "on_error": "warn"}
    rlk_ledger.init(tmp_path / "l", run_id="r", role="training", **where)
    caplog.set_level(logging.WARNING)
    data = padded(trajectories(1))
    data.batch = {k: v for k, v in {**data.batch, **change}.items() if v is not None}
    record_rollout(data, config=config())
    record_old_log_probs(data, config=config())
    rlk_ledger.close()
    assert sentence in caplog.text
    gaps = list(load_history(rlk_ledger.open(tmp_path / "l"), "r").of("gap"))
    assert gaps
    assert {g.fields["kind"] for g in gaps} == {"rejected"}


def test_a_plain_mapping_of_lists_will_do() -> None:
    data = {"responses": [[5, 6]], "prompts": [[1]], "response_mask": [[1, 1]], "rollout_log_probs": [[-1.0, -2.0]]}
    with capture(role="training") as events:
        record_rollout(data, keys=["a"])
        record_old_log_probs({**data, "old_log_probs": [[-1.1, -2.1]]}, keys=["a"], weight_version=3)
    assert events.of("rollout.sample")[0].arrays["response_token_ids"] == [5, 6]
    assert [e.fields["source"] for e in events.of("logprobs")] == ["rollout", "training"]
    assert {e.fields["sample_id"] for e in events.of("logprobs")} == {"a"}
