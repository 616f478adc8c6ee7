"""Which sample a trainer's row belongs to: its tokens decide, never its position.

A row joins the one sample of its step with the same prompt and response tokens. Where several samples have these tokens
the index the row names, or the rollout's log-probabilities it carries, must single one of them out. A row whose tokens
no sample has is recorded under the sample it names, as having scored other tokens; one that names none, or joins no
single sample, is left out. All of these are findings.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from rlk_ledger.audit.finding import Finding
from rlk_ledger.importers.model import Ids, Imported, Mask, Scored, Source, Values


@dataclass(slots=True, eq=False)
class TrainRow:
    """What a trainer's dump holds of one sample: tokens, mask and values (float32, one a response token) by source.

    `index` and `position` are what the dump says of it; `rank` is the rank whose file or shard it was in, `dp` its
    data-parallel rank.
    """

    where: str
    prompt: Ids
    response: Ids
    mask: Mask
    origin: Source
    index: int | None = None
    position: int | None = None
    rank: int | None = None
    dp: int | None = None
    rollout: Values | None = None
    scores: list[Scored] = field(default_factory=list)
    sample: Imported | None = None

    @property
    def key(self) -> tuple[bytes, bytes]:
        """The tokens, which are what a join verifies."""
        return self.prompt.tobytes(), self.response.tobytes()


def join(samples: Sequence[Imported], rows: Iterable[TrainRow], step: int) -> list[Finding]:
    """Sets `sample` of every row that belongs to one of `samples`; returns what could not be joined."""
    by_tokens: dict[tuple[bytes, bytes], list[Imported]] = defaultdict(list)
    by_index: dict[int, list[Imported]] = defaultdict(list)
    for sample in samples:
        by_tokens[sample.key].append(sample)
        if sample.index is not None:
            by_index[sample.index].append(sample)
    ambiguous: list[TrainRow] = []
    differing: list[TrainRow] = []
    unknown: list[TrainRow] = []
    for row in rows:
        candidates = by_tokens.get(row.key, [])
        if candidates:
            row.sample = _single(row, candidates)
            if row.sample is None:
                ambiguous.append(row)
            continue
        named = by_index.get(row.index, []) if row.index is not None else []
        row.sample = named[0] if len(named) == 1 else None
        (unknown if row.sample is None else differing).append(row)
    return [*_ambiguous(ambiguous, step), *_differing(differing, step), *_unknown(unknown, step)]


def _single(row: TrainRow, candidates: list[Imported]) -> Imported | None:
    """The one candidate the row can mean, all of which have its tokens."""
    if len(candidates) == 1:
        return candidates[0]
    named = [sample for sample in candidates if row.index is not None and sample.index == row.index]
    if len(named) == 1:
        return named[0]
    carried = [sample for sample in candidates if same_where(row.mask, rollout_of(sample), row.rollout)]
    return carried[0] if len(carried) == 1 else None


def rollout_of(sample: Imported) -> Values | None:
    """The rollout's own values of a sample, None where there are none."""
    return next((s.values for s in sample.scores if s.source == "rollout"), None)


def same_where(mask: Mask, left: Values | None, right: Values | None) -> bool:
    """Whether two float32 arrays are there and hold the same bits at every token of the loss; others enter nothing."""
    if left is None or right is None or len(left) != len(right):
        return False
    return bool(left[mask != 0].tobytes() == right[mask != 0].tobytes())


def _ambiguous(rows: list[TrainRow], step: int) -> list[Finding]:
    if not rows:
        return []
    where = {"step": step, "samples": len(rows), "row": rows[0].where, "file": rows[0].origin.name}
    reason = "several samples have these tokens and the row does not say which is meant; its values were left out"
    return [Finding("samples.ambiguous", where, {"reason": reason, "rows": [row.where for row in rows[:20]]})]


def _differing(rows: list[TrainRow], step: int) -> list[Finding]:
    if not rows:
        return []
    first = rows[0]
    sample_id = first.sample.sample_id if first.sample is not None else None
    where = {"source": "training", "step": step, "samples": len(rows), "sample_id": sample_id, "row": first.where}
    reason = "the row names this sample and holds other tokens; its values are recorded with the tokens it holds"
    return [Finding("tokens.differ", where, {"reason": reason, "rows": [row.where for row in rows[:20]]})]


def _unknown(rows: list[TrainRow], step: int) -> list[Finding]:
    if not rows:
        return []
    where = {"source": "training", "step": step, "rows": len(rows), "row": rows[0].where, "file": rows[0].origin.name}
    reason = "no sample of the step has the row's tokens, and it names none; its values were left out"
    return [
        Finding(
            "evidence.incomplete",
            {**where, "field": "rollout.sample"},
            {"reason": reason},
            "Import the rollout dump these rows were trained from.",
        )
    ]
