"""One step of a slime-like run: its samples, the trainer's rows joined to them, and what is missing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from rlk_ledger.audit.finding import Finding
from rlk_ledger.importers.joining import TrainRow, join, rollout_of, same_where
from rlk_ledger.importers.model import ABSENT, DERIVED, MEASURED, Batch, Imported, Layout, Scored
from rlk_ledger.importers.rollout_rows import missing_where, tool_zeros

if TYPE_CHECKING:
    from rlk_ledger.importers.torch_dumps import Step

_NOT_OWED = ("aborted", "failed")


def assemble(batch: Batch, step: Step) -> None:
    """Adds the samples, layouts, findings and notes of one step to `batch`."""
    samples = step.samples
    if samples:
        batch.findings += join(samples, step.rows, step.number)
        _positions(batch, step)
    else:
        samples = _from_rows(step)
    for row in step.rows:
        if row.sample is not None:
            batch.findings += _take(row.sample, row)
    batch.samples += samples
    batch.layouts += _layouts(step)
    batch.findings += _missing(step, samples)


def _from_rows(step: Step) -> list[Imported]:
    """Samples made of the trainer's rows alone, where no rollout dump of the step was given."""
    found: dict[tuple[int | None, bytes, bytes], Imported] = {}
    for number, row in enumerate(step.rows):
        key = (row.index, *row.key)
        if key not in found:
            name = f"{step.number}-{row.index}" if row.index is not None else f"{step.number}-t{number}"
            taken = {sample.sample_id for sample in found.values()}
            found[key] = Imported(
                sample_id=name if name not in taken else f"{name}-{number}",
                step=step.number,
                prompt=row.prompt,
                response=row.response,
                mask=row.mask,
                origin=row.origin,
                index=row.index,
                rollout_id=step.number,
                metadata={"loss_mask": MEASURED, "weight_spans": ABSENT, "sampling": ABSENT, "engine": ABSENT},
            )
        row.sample = found[key]
    return list(found.values())


def _positions(batch: Batch, step: Step) -> None:
    """Says how many rows name a place in the rollout that another sample has."""
    order = {id(sample): i for i, sample in enumerate(step.samples)}
    placed = [row for row in step.rows if row.sample is not None and row.position is not None]
    lying = sum(order[id(row.sample)] != row.position for row in placed)
    if lying:
        batch.notes.append(
            f"step {step.number}: {lying} of {len(placed)} rows name another position than their tokens have in the "
            "rollout; the tokens were believed."
        )


def _take(sample: Imported, row: TrainRow) -> list[Finding]:
    """Adds a row's values to its sample: ranks repeat each other, and what differs between them is kept and named."""
    findings: list[Finding] = []
    if row.rollout is not None and row.key == sample.key:
        held = rollout_of(sample)
        classes = missing_where(tool_zeros(row.rollout, row.mask))
        copy = Scored("rollout", row.rollout, row.origin, classes, mask=row.mask, metadata={"weight_version": ABSENT})
        if held is None:
            copy.fields["weight_version"] = _only_version(sample)
            copy.metadata["weight_version"] = DERIVED if copy.fields["weight_version"] is not None else ABSENT
            sample.scores.insert(0, copy)
        elif not same_where(row.mask, held, row.rollout):
            copy.fields["pass_id"] = "trainer-copy"
            sample.scores.append(copy)
            findings.append(_differs(sample, row, "rollout", held, row.rollout))
    for score in row.scores:
        first = next((s for s in sample.scores if s.source == score.source), None)
        if score.source == "training":
            score.fields["layout_id"] = _layout_id(sample.step, row.dp if row.dp is not None else row.rank)
        if first is None:
            sample.scores.append(score)
        elif not same_where(row.mask, first.values, score.values):
            score.fields["pass_id"] = f"rank-{row.rank}" if row.rank is not None else row.where
            sample.scores.append(score)
            findings.append(_differs(sample, row, score.source, first.values, score.values))
    return findings


def _only_version(sample: Imported) -> str | None:
    spans = sample.fields.get("weight_spans") or []
    return str(spans[0]["version"]) if len(spans) == 1 else None


def _differs(sample: Imported, row: TrainRow, source: str, left: Any, right: Any) -> Finding:
    shared = min(len(left), len(right))
    at = np.flatnonzero((left[:shared].view(np.uint32) != right[:shared].view(np.uint32)) & (row.mask[:shared] != 0))
    where = {
        "source": source,
        "sample_id": sample.sample_id,
        "position": int(at[0]) if at.size else shared,
        "file": row.origin.name,
    }
    return Finding(
        "replicas.differ", where, {"reason": "two dumps hold different values of one pass", "row": row.where}
    )


def _layout_id(step: int | None, rank: int | None) -> str | None:
    return None if rank is None else f"{step}-dp{rank}"


def _layouts(step: Step) -> list[Layout]:
    """One layout a data-parallel rank, its samples in the order it trained them; left out where that is not known."""
    out: dict[str, Layout] = {}
    for shard, origin in step.shards:
        layout_id = _layout_id(step.number, shard["rank"])
        rows = [row for row in step.rows if shard["rank"] in (row.dp, row.rank)]
        ordered = _ordered(rows, shard)
        joined = [row for row in ordered if row is not None and row.sample is not None]
        if layout_id is None or layout_id in out or len(joined) != len(ordered) or not joined:
            continue
        fields = {
            "layout_id": layout_id,
            "sample_order": [row.sample.sample_id for row in joined if row.sample is not None],
            "sequence_lengths": np.array([len(row.prompt) + len(row.response) for row in joined], np.int32),
            "micro_batch": shard["micro_batch"],
            "global_batch": shard["global_batch"],
        }
        out[layout_id] = Layout(step.number, fields, origin)
    return list(out.values())


def _ordered(rows: list[TrainRow], shard: dict[str, Any]) -> list[TrainRow | None]:
    """The rows in the shard's own order, by the indices or places it lists; in the file's where it lists none."""
    for names, listed in (("index", shard["indices"]), ("position", shard["positions"])):
        if listed:
            held = {getattr(row, names): row for row in rows}
            return [held.get(name) for name in listed]
    return list(rows)


def _missing(step: Step, samples: list[Imported]) -> list[Finding]:
    """Rank files that must exist, and samples that train files should have scored and did not."""
    if not step.rows:
        return []
    absent = sorted(set(range(max(step.ranks, default=-1) + 1)) - step.ranks)
    unscored = [s for s in samples if _owed(s) and not any(score.source == "training" for score in s.scores)]
    holes = [] if step.samples else _holes(step)
    if not absent and not unscored and not holes:
        return []
    where: dict[str, Any] = {"field": "train_data", "step": step.number, "samples": len(unscored)}
    if absent:
        where["missing_ranks"] = absent
    if holes:
        where["missing_positions"] = holes[:20]
    evidence = {
        "reason": "not every sample of the step has training values: a rank's file is missing, or it was not trained",
        "ranks_found": sorted(step.ranks),
        "sample_ids": [s.sample_id for s in unscored[:20]],
        "samples_in_step": len(samples),
    }
    return [Finding("evidence.incomplete", where, evidence, "Import the train files of every rank of the step.")]


def _holes(step: Step) -> list[int]:
    """Places of the rollout that no rank's rows have, where every row names one; without the rollout dump they tell."""
    places = {row.position for row in step.rows if row.position is not None}
    if len(places) < len({row.key for row in step.rows}):
        return []
    return sorted(set(range(max(places, default=-1) + 1)) - places)


def _owed(sample: Imported) -> bool:
    return bool(sample.mask.any()) and sample.fields.get("status") not in _NOT_OWED
