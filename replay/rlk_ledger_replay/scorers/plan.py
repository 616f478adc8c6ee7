"""From a prepared replay to jobs for live engines, and from their answers back to one value a compared token.

One process serves one engine, one checkpoint, one dtype and one set of layouts: it is reused for every pass that shares
all of them and for nothing else.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from msgspec import structs

from rlk_ledger.history import History, Sample
from rlk_ledger.pairs import PairedSample
from rlk_ledger_kernels.dtypes import DType
from rlk_ledger_replay.numerics import Numerics
from rlk_ledger_replay.preparation import Prepared
from rlk_ledger_replay.scorers.child import Answer, Problem, run_child
from rlk_ledger_replay.scorers.engines import OWN_PATH, Live, Wanted
from rlk_ledger_replay.scorers.layouts import Batches, Layouts
from rlk_ledger_replay.scorers.protocol import Guard, Job, Pass, Statement, TokenSequence, sequence
from rlk_ledger_replay.scores import Float32, Index, Tokens
from rlk_ledger_replay.semantics import Declared, dtype_name

Role = Literal["prefill", "decode", "alone", "float32"]
"""What a value is for: a path in the side's layout; its own path one sequence at a time; its own path in float32."""


@dataclass(frozen=True)
class Task:
    """One process to be: its job, whom it serves, which pairs its sequences begin with and which tokens it answers."""

    wanted: Wanted
    job: Job
    pairs: tuple[int, ...]
    rows: Index
    version: int
    roles: Mapping[str, Role]
    note: str = ""


@dataclass(frozen=True)
class Attempt:
    """One role of one engine under one weight version: what came of it."""

    wanted: Wanted
    role: Role
    version: int
    status: Literal["completed", "error", "not_measured"]
    reason: str
    layout: str
    elapsed: float = 0.0


@dataclass
class LiveScores:
    """What the live engines gave: float32 nats [N] by scorer and role, NaN where nothing was scored.

    statements: by scorer and dtype, the first one given. guards: by scorer, of all processes and passes.
    """

    wanted: tuple[Wanted, ...] = ()
    values: dict[tuple[Wanted, Role], Float32] = field(default_factory=dict)
    attempts: list[Attempt] = field(default_factory=list)
    statements: dict[tuple[Wanted, str], Statement] = field(default_factory=dict)
    guards: dict[Wanted, list[Guard]] = field(default_factory=dict)
    notes: dict[Wanted, str] = field(default_factory=dict)

    def get(self, wanted: Wanted, role: Role) -> Float32 | None:
        """The values of a role, None unless every compared token has one."""
        found = self.values.get((wanted, role))
        return None if found is None or np.isnan(found).any() else found

    def layout(self, wanted: Wanted) -> str:
        """The layout of the engine's main passes."""
        return next((a.layout for a in self.attempts if a.wanted == wanted and a.role != "alone"), "")


def tasks(prepared: Prepared, history: History, live: Live) -> list[Task]:
    """The processes a replay needs, each engine's in the order of weight versions, its own dtype before float32."""
    tokens, folders = prepared.tokens, prepared.folders or {}
    assert tokens is not None
    layouts = Layouts(history)
    out: list[Task] = []
    for wanted in live.scorers:
        for version in sorted(folders):
            rows = np.flatnonzero(tokens.version_N == version)
            for group in _alike(prepared, wanted, rows, tokens):
                out += _tasks(prepared, history, live, wanted, version, group, layouts)
    return out


def run(
    found: Sequence[Task], tokens: Tokens, live: Live, advance: Callable[[int], None] = lambda _: None
) -> LiveScores:
    """Runs the processes one after the other; what fails is an attempt, never an exception."""
    scores = LiveScores(live.scorers)
    for task in found:
        python = live.pythons.get(task.wanted.engine.name) or sys.executable
        answer = run_child(task.wanted.engine.module, task.job, python=python, timeout=live.timeout, advance=advance)
        _collect(task, answer, tokens, scores)
    return scores


def passes(found: Sequence[Task]) -> int:
    """How many passes the processes will answer: the length of a progress bar."""
    return sum(len(task.job.passes) for task in found)


def _alike(prepared: Prepared, wanted: Wanted, rows: Index, tokens: Tokens) -> Iterator[tuple[int, ...]]:
    """Pairs whose side declared the same mode and dtypes: one engine configuration each."""
    groups: dict[tuple[Any, ...], list[int]] = {}
    for pair in np.unique(tokens.pair_N[rows]).tolist():
        one = prepared.declared[wanted.side][pair]
        shape = one.imitation
        key = (one.reference.logprob_mode, shape and (shape.compute, shape.lm_head, shape.logits))
        groups.setdefault(key, []).append(pair)
    for group in groups.values():
        yield tuple(group)


def _tasks(
    prepared: Prepared,
    history: History,
    live: Live,
    wanted: Wanted,
    version: int,
    group: tuple[int, ...],
    layouts: Layouts,
) -> Iterator[Task]:
    assert prepared.tokens is not None
    assert prepared.folders is not None
    pairs = [prepared.selection.pairs[index] for index in group]
    declared = [prepared.declared[wanted.side][index] for index in group]
    batches = layouts.of(pairs, wanted.side)
    folder = prepared.folders[version]
    own = declared[0].imitation
    dtype, note = (own.compute, "") if own is not None else (_config_dtype(folder), "dtype taken from the checkpoint")
    base = Job(
        engine=wanted.engine.name,
        folder=str(folder),
        weights=_digest(prepared, folder),
        dtype=dtype,
        head=None if own is None else own.lm_head,
        logits=None if own is None else own.logits,
        mode=declared[0].reference.logprob_mode,
        sequences=tuple(_sequence(sample, declared, index) for index, sample in enumerate(batches.samples)),
        passes=(),
        tensor_parallel=live.tensor_parallel or _recorded_tp(history, pairs, wanted),
        settings=_settings(history, pairs, wanted),
    )
    tokens = prepared.tokens
    rows = np.flatnonzero((tokens.version_N == version) & np.isin(tokens.pair_N, group))
    made = Task(wanted, base, group, rows, version, {}, "; ".join(part for part in (batches.reason, note) if part))
    yield _with(made, _own_passes(wanted, batches, len(group)))
    if live.float32:
        job = structs.replace(base, dtype="float32", head="float32", logits="float32")
        path = OWN_PATH[wanted.side]
        yield _with(replace(made, job=job), {"float32": Pass("float32", path, batches.layout)})


def _with(task: Task, roles: Mapping[Role, Pass]) -> Task:
    job = structs.replace(task.job, passes=tuple(roles.values()))
    return replace(task, job=job, roles={one.name: role for role, one in roles.items()})


def _own_passes(wanted: Wanted, batches: Batches, chosen: int) -> dict[Role, Pass]:
    own = OWN_PATH[wanted.side]
    roles: dict[Role, Pass] = {"prefill": Pass("prefill", "prefill", batches.layout)}
    if wanted.side == "rollout":
        roles["decode"] = Pass("decode", "decode", batches.layout)
    roles["alone"] = Pass("alone", own, batches.alone(chosen))
    return roles


def _sequence(sample: Sample, declared: Sequence[Declared], index: int) -> TokenSequence:
    """A sample as the engine gets it; company takes the temperature of the first chosen sample."""
    reference: Numerics = declared[index if index < len(declared) else 0].reference
    prompt = np.asarray(sample.prompt_token_ids)
    return sequence(np.concatenate([prompt, sample.response_token_ids]), len(prompt), reference.temperature)


def _digest(prepared: Prepared, folder: Path) -> str | None:
    """The live-tensor digest that was checked for this folder, None where another scheme was."""
    for gate in prepared.gates:
        if gate.gate.startswith("weights.digest.") and gate.evidence.get("folder") == str(folder):
            found = str(gate.evidence.get("digest"))
            return found if found.startswith("sum64x2:") else None
    return None


def _config_dtype(folder: Path) -> DType:
    config = json.loads((folder / "config.json").read_bytes())
    return dtype_name(config.get("dtype") or config.get("torch_dtype")) or "float32"


def _writers(pairs: Sequence[PairedSample], wanted: Wanted) -> set[str]:
    series = [pair.rollout_series if wanted.side == "rollout" else pair.training_series for pair in pairs]
    return {score.writer_id for one in series for score in one.scores}


def _recorded_tp(history: History, pairs: Sequence[PairedSample], wanted: Wanted) -> int:
    """The tensor-parallel size the side's writers opened with; 1 where none was recorded."""
    sizes = {
        int(((history.writers.get(writer) or {}).get("parallel") or {}).get("tp", {}).get("size", 1))
        for writer in _writers(pairs, wanted)
    }
    return max(sizes, default=1)


def _settings(history: History, pairs: Sequence[PairedSample], wanted: Wanted) -> dict[str, Any]:
    """Settings the side's writers read back, under the names the engine takes them by."""
    writers = _writers(pairs, wanted)
    names = dict(wanted.engine.settings)
    out: dict[str, Any] = {}
    for fact in history.of("knob.applied"):
        name = names.get(fact.fields["path"])
        if name is not None and fact.writer_id in writers and fact.fields.get("actual") is not None:
            out[name] = fact.fields["actual"]
    return out


def _collect(task: Task, answer: Answer, tokens: Tokens, scores: LiveScores) -> None:
    wanted = task.wanted
    if answer.statement is not None:
        scores.statements.setdefault((wanted, task.job.dtype), answer.statement)
        scores.guards.setdefault(wanted, []).extend(answer.statement.guards)
    if task.note:
        scores.notes[wanted] = task.note
    for one in task.job.passes:
        role = task.roles[one.name]
        problem: Problem | None = answer.problems.get(one.name)
        name = one.layout.name
        if problem is not None:
            reason = _told(problem, wanted)
            scores.attempts.append(Attempt(wanted, role, task.version, problem.status, reason, name, answer.elapsed))
            continue
        spent = answer.seconds[one.name]
        scores.attempts.append(Attempt(wanted, role, task.version, "completed", "", name, spent))
        scores.guards.setdefault(wanted, []).extend(answer.guards[one.name])
        into = scores.values.setdefault((wanted, role), np.full(len(tokens), np.nan, dtype=np.float32))
        for index, pair in enumerate(task.pairs):
            rows = task.rows[tokens.pair_N[task.rows] == pair]
            into[rows] = answer.values[one.name][index][tokens.position_N[rows]]


def _told(problem: Problem, wanted: Wanted) -> str:
    if problem.status == "not_measured" and "odule" in problem.reason and "No module named" in problem.reason:
        return (
            f"{problem.reason}; {wanted.engine.install}, or name an interpreter that has it: "
            f"--scorer-python {wanted.engine.name}=PATH"
        )
    return problem.reason


__all__ = ["Attempt", "LiveScores", "Role", "Task", "passes", "run", "tasks"]
