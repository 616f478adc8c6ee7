"""Which sequences an engine computes together: as the side recorded it, in plain batches, or one at a time.

A recorded batch is rebuilt whole: samples that nobody chose keep the chosen ones company, because on most engines a
row's bits depend on the rows beside it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlk_ledger.history import History, Sample
from rlk_ledger.pairs import PairedSample
from rlk_ledger_replay.scorers.protocol import Layout, Padding
from rlk_ledger_replay.semantics import Side

BATCH = 8
"""Sequences of a batch where no layout was recorded."""

Key = tuple[str, int | None]


@dataclass(frozen=True)
class Batches:
    """Samples in the order they are sent, batches as indices into them, and how they came about.

    name: `recorded`, or `together` where no layout could be rebuilt, with the reason.
    """

    samples: tuple[Sample, ...]
    layout: Layout
    reason: str = ""

    def alone(self, chosen: int) -> Layout:
        """The first `chosen` samples one at a time."""
        return Layout("alone", tuple((index,) for index in range(chosen)), "none")


class Layouts:
    """The recorded layouts of a run, by writer and layout id; by id alone where one rank tells it for all."""

    def __init__(self, history: History) -> None:
        """Reads every `batch.layout` and which samples exist."""
        self._facts = {(fact.writer_id, fact.fields["layout_id"]): fact.fields for fact in history.of("batch.layout")}
        by_id: dict[str, list[dict[str, Any]]] = {}
        for (_, layout), fields in self._facts.items():
            by_id.setdefault(layout, []).append(fields)
        self._told = {layout: found[0] for layout, found in by_id.items() if all(one == found[0] for one in found)}
        self._samples: dict[str, list[Sample]] = {}
        for sample in history.samples:
            self._samples.setdefault(sample.sample_id, []).append(sample)

    def of(self, pairs: Sequence[PairedSample], side: Side) -> Batches:
        """The batches of these pairs on one side; the pairs' own samples come first, in their order."""
        chosen = tuple(pair.sample for pair in pairs)
        orders, padding, reason = self._recorded(pairs, side)
        if reason:
            batches = tuple(tuple(range(at, min(at + BATCH, len(chosen)))) for at in range(0, len(chosen), BATCH))
            return Batches(chosen, Layout("together", batches, "right"), reason)
        known = {sample.key: index for index, sample in enumerate(chosen)}
        samples = list(chosen)
        batches_: list[tuple[int, ...]] = []
        for order in orders:
            for sample in order:
                if sample.key not in known:
                    known[sample.key] = len(samples)
                    samples.append(sample)
            batches_.append(tuple(known[sample.key] for sample in order))
        return Batches(tuple(samples), Layout("recorded", tuple(batches_), padding))

    def _recorded(self, pairs: Sequence[PairedSample], side: Side) -> tuple[list[list[Sample]], Padding, str]:
        """Orders of the batches the pairs were in, their padding, and why there are none."""
        orders: dict[tuple[str, str], list[Sample]] = {}
        sides: set[Any] = set()
        for pair in pairs:
            score = (pair.rollout_series if side == "rollout" else pair.training_series).first
            layout = score.layout_id or ""
            found = self._facts.get((score.writer_id, layout)) or self._told.get(layout)
            if found is None:
                return [], "none", "no batch layout was recorded for its values"
            if found.get("packing"):
                return [], "none", "its batches were packed, which no scorer rebuilds"
            order = self._order(found, pair.sample)
            if order is None:
                return [], "none", f"layout {score.layout_id} names samples that were not recorded whole"
            orders[layout, str(pair.sample.step)] = order
            sides.add(found.get("padding_side"))
        if len(sides) > 1:
            return [], "none", "its batches were padded on different sides"
        padding: Mapping[Any, Padding] = {"left": "left", "none": "none"}
        return list(orders.values()), padding.get(sides.pop(), "right"), ""

    def _order(self, found: Mapping[str, Any], own: Sample) -> list[Sample] | None:
        order = []
        for name in found.get("sample_order") or ():
            candidates = [one for one in self._samples.get(name, ()) if one.step == own.step]
            sample = own if name == own.sample_id else candidates[0] if len(candidates) == 1 else None
            if sample is None or sample.prompt_token_ids is None or not len(sample):
                return None
            order.append(sample)
        return order if any(one.key == own.key for one in order) else None
