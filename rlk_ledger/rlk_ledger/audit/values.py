"""Are the recorded numbers measurements? (values.nan, inf, sentinel, defaulted, copied, missing, impossible)

`impossible` values are counted always and raised only when rounding cannot explain them: low-precision arithmetic
puts a log-probability of a nearly certain token a little above zero as often as below.
"""

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
from rlk_ledger_schemas.tolerances import tolerance

from rlk_ledger import classes
from rlk_ledger.audit.finding import Finding
from rlk_ledger.audit.view import View
from rlk_ledger.pairs import SIDES
from rlk_ledger.series import Series

_RAISED = {
    "values.nan": (classes.NAN,),
    "values.inf": (classes.POS_INF, classes.NEG_INF),
    "values.sentinel": (classes.SENTINEL,),
    "values.defaulted": (classes.DEFAULTED,),
    "values.missing": (classes.MISSING,),
}
_IMPOSSIBLE_SHARE = 0.05
"""Above this share of active tokens no rounding explains values above zero: they are not log-probabilities."""


def detect(view: View) -> Iterable[Finding]:
    """The census of value classes over active tokens of every sample, per side."""
    for source in SIDES:
        census = _Census(view, source)
        for finding_id, codes in _RAISED.items():
            yield from census.raised(finding_id, codes)
        yield from census.impossible(view)
    yield from _copied(view)


class _Census:
    """Active tokens of one side: values, classes and where each is."""

    def __init__(self, view: View, source: str) -> None:
        self.source = source
        self.ids: list[str] = []
        values: list[npt.NDArray[np.float32]] = []
        codes: list[npt.NDArray[np.uint8]] = []
        owner: list[npt.NDArray[np.int64]] = []
        at: list[npt.NDArray[np.int64]] = []
        for sample_id, active, value, code in _sides(view, source):
            where = np.flatnonzero(active)
            values.append(value[where])
            codes.append(code[where])
            owner.append(np.full(len(where), len(self.ids), np.int64))
            at.append(where)
            self.ids.append(sample_id)
        empty = np.empty(0, np.int64)
        self.values = np.concatenate(values) if values else empty.astype(np.float32)
        self.codes = np.concatenate(codes) if codes else empty.astype(np.uint8)
        self.owner = np.concatenate(owner) if owner else empty
        self.position = np.concatenate(at) if at else empty

    def raised(self, finding_id: str, codes: tuple[int, ...]) -> Iterable[Finding]:
        hits = np.flatnonzero(np.isin(self.codes, codes))
        if hits.size:
            yield self.finding(finding_id, hits)

    def finding(self, finding_id: str, hits: npt.NDArray[np.int64]) -> Finding:
        first = int(hits[0])
        where = {
            "source": self.source,
            "count": len(hits),
            "sample_id": self.ids[int(self.owner[first])],
            "position": int(self.position[first]),
        }
        distinct = np.unique(self.values[hits])[:5]
        samples = np.unique(self.owner[hits])
        evidence = {
            "active_tokens": len(self.codes),
            "samples": len(samples),
            "sample_ids": [self.ids[i] for i in samples[:20].tolist()],
            "values": distinct.tolist(),
        }
        return Finding(finding_id, where, evidence)

    def impossible(self, view: View) -> Iterable[Finding]:
        hits = np.flatnonzero(self.codes == classes.IMPOSSIBLE)
        if not hits.size:
            return
        height = tolerance("logprob", "bfloat16").atol
        if len(view.tokens):
            height = max(height, float(np.quantile(np.abs(view.tokens.d), 0.999)))
        beyond = hits[self.values[hits] > height]
        if hits.size > _IMPOSSIBLE_SHARE * len(self.codes):
            beyond = hits
        if beyond.size:
            yield self.finding("values.impossible", beyond)


def _sides(
    view: View, source: str
) -> Iterable[tuple[str, npt.NDArray[np.bool_], npt.NDArray[np.float32], npt.NDArray[np.uint8]]]:
    """(sample id, active, values, classes) of one side: paired samples as classed, others by their own bits."""
    paired = {p.sample.key for p in view.pairs}
    for p in view.pairs:
        yield p.sample.sample_id, p.active, getattr(p, source), getattr(p, f"{source}_class")
    for sample in view.pairing.samples:
        if sample.key in paired:
            continue
        series = _agreeing(view.pairing.series[sample.key][source])
        if series is not None:
            codes = classes.own_classes(series.values, series.recorded)
            codes[~series.present] = classes.MISSING
            yield sample.sample_id, sample.loss_mask.astype(np.bool_), series.values, codes


def _agreeing(series: list[Series]) -> Series | None:
    """The first pass over the sample's own tokens: values of other tokens are named by tokens.differ."""
    return next((s for s in series if s.agrees), None)


def _copied(view: View) -> Iterable[Finding]:
    hits = [(p, np.flatnonzero(p.active & (p.training_class == classes.COPIED))) for p in view.pairs]
    hits = [(p, at) for p, at in hits if at.size]
    if not hits:
        return
    first, at = hits[0]
    where = {
        "source": "training",
        "count": sum(len(a) for _, a in hits),
        "sample_id": first.sample.sample_id,
        "position": int(at[0]),
    }
    evidence = {
        "sides": list(SIDES),
        "samples": len(hits),
        "sample_ids": [p.sample.sample_id for p, _ in hits[:20]],
        "equal_fraction": view.pairing.equal_fraction,
    }
    yield Finding("values.copied", where, evidence)
