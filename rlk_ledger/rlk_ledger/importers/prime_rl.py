"""Token exports of prime-rl (schema 1): `token_exports/step_<n>/rank_<r>.jsonl`, one line a packed sequence.

A line has both sides: `inference_logprobs` and `trainer_logprobs`, entry i scoring token i, null where the trainer's
number was not finite. A file of a step is complete when `STABLE` lies beside it. Nothing in an export says which
weights either side used, at which temperature, or which samples form a group.
"""

from pathlib import Path
from typing import Any

import numpy as np

from rlk_ledger.audit.finding import Finding
from rlk_ledger.importers.files import Progress, find, hashed, reading
from rlk_ledger.importers.jsonl import lines
from rlk_ledger.importers.model import ABSENT, DERIVED, MEASURED, Batch, Imported, Source
from rlk_ledger.importers.rows import Row
from rlk_ledger.importers.sequences import column, response_start, scored

_SCHEMA = 1
_NEVER = ("weight_spans", "sampling", "engine", "tokenizer", "finish_reason", "status", "group_id", "model", "cache")


def read(path: Path, progress: Progress) -> Batch:
    """Every export below `path`; raises FormatError or UsageError, one sentence."""
    batch = Batch("prime-rl")
    seen: dict[str, str] = {}
    for source in hashed(find(path, "rank_*.jsonl"), progress):
        with reading(source):
            steps = set()
            for number, row in enumerate(lines(source)):
                sample = _sample(row, number, source)
                if sample.sample_id in seen:
                    where = seen[sample.sample_id]
                    raise row.fail(f"sample {sample.sample_id} is in {where} too; import each run by itself.")
                seen[sample.sample_id] = f"{source.name}, {row.where}"
                batch.samples.append(sample)
                steps.add(sample.step)
        batch.sources.append(source)
        batch.findings += _unfinished(source, sorted(s for s in steps if s is not None))
    return batch


def _sample(row: Row, number: int, origin: Source) -> Imported:
    version = row.maybe_count("schema_version")
    if version != _SCHEMA:
        told = "no `schema_version`" if version is None else f"`schema_version` {version}"
        raise row.fail(f"it has {told}; schema {_SCHEMA} of the prime-rl token export is known.")
    step = row.maybe_count("export_step")
    step = row.count("step") if step is None else step
    rank, order = row.maybe_count("rank") or 0, row.maybe_count("export_sequence_idx")
    ids = row.ids("token_ids")
    whole = row.mask("loss_mask", len(ids))
    start = response_start(whole)
    sample = Imported(
        sample_id=f"{step}-{rank}-{number if order is None else order}",
        step=step,
        prompt=ids[:start],
        response=ids[start:],
        mask=whole[start:],
        origin=origin,
        metadata={"prompt_token_ids": DERIVED, "loss_mask": MEASURED, **dict.fromkeys(_NEVER, ABSENT)},
    )
    _describe(sample, row, len(ids))
    _score(sample, row, slice(start, len(ids)), rank)
    return sample


def _describe(sample: Imported, row: Row, length: int) -> None:
    environment = row.maybe_text("env_name")
    if environment is not None:
        sample.fields["labels"] = {"env": environment}
    if "position_ids" in row:
        positions = row.ids("position_ids")
        if len(positions) != length:
            raise row.fail(f"`position_ids` has {len(positions)} entries for {length} tokens.")
        if not np.array_equal(positions, np.arange(length)):
            sample.fields["position_ids"] = positions[len(sample.prompt) :]
    rewards = row.get("rewards")
    active = (
        [rewards[len(sample.prompt) + i] for i in np.flatnonzero(sample.mask)] if _one_each(rewards, length) else []
    )
    known = {r for r in active if type(r) in (int, float)}
    if len(known) == 1 and np.isfinite(next(iter(known))):
        sample.fields["reward"] = float(known.pop())
    sample.metadata["reward"] = DERIVED if "reward" in sample.fields else ABSENT


def _one_each(value: Any, length: int) -> bool:
    return type(value) is list and len(value) == length


def _score(sample: Imported, row: Row, cut: slice, rank: int) -> None:
    for name, source in (("inference_logprobs", "rollout"), ("trainer_logprobs", "training")):
        if name not in row:
            continue
        score = scored(row, name, source, cut, sample.mask, sample.response, sample.origin, source == "rollout")
        score.metadata = {"weight_version": ABSENT, "dtype": ABSENT}
        if source == "training":
            micro = row.maybe_count("micro_step")
            score.fields["layout_id"] = None if micro is None else f"{sample.step}-{rank}-micro{micro}"
            if _one_each(row.get("entropy"), cut.stop):
                entropy, missing = column(row, "entropy", cut)
                score.entropy = None if missing.any() else entropy
        sample.scores.append(score)


def _unfinished(source: Source, steps: list[int]) -> list[Finding]:
    """A step folder without STABLE: more of it may still be written."""
    folder = source.path.parent
    if not folder.name.startswith("step_") or (folder / "STABLE").exists():
        return []
    reason = "the step's folder has no STABLE file: its export may have been cut short, or still run"
    where: dict[str, Any] = {"field": "token_exports", "file": source.name, "steps": steps}
    return [Finding("evidence.incomplete", where, {"reason": reason}, "Import the step again once it is complete.")]
