"""Are the recorded numbers measurements? (values.nan, inf, sentinel, defaulted, copied, missing, impossible)

Every class is counted; two are raised only when the run's own noise cannot explain them. Low-precision arithmetic puts
the log-probability of a nearly certain token a little above zero as often as below (`impossible`), or exactly at zero
where the other side says -0.02 (`defaulted`).
"""

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from rlk_ledger import classes
from rlk_ledger.audit.finding import Finding
from rlk_ledger.audit.view import View
from rlk_ledger.pairs import SIDES
from rlk_ledger.series import Series
from rlk_ledger_schemas.metrics import DEFAULTED_OTHER_BELOW
from rlk_ledger_schemas.tolerances import tolerance

_RAISED = {
    "values.nan": (classes.NAN,),
    "values.inf": (classes.POS_INF, classes.NEG_INF),
    "values.sentinel": (classes.SENTINEL,),
    "values.missing": (classes.MISSING,),
}
_NOISE_QUANTILE = 0.999
_NOISE_MARGIN = 2.0
_MANY = 5
_ALONE = 2.0
_IMPOSSIBLE_SHARE = 0.05
"""Above this share of active tokens no rounding explains values above zero: they are not log-probabilities."""


def detect(view: View) -> Iterable[Finding]:
    """The census of value classes over active tokens of every sample, per side."""
    noise = {True: np.sort(np.abs(view.tokens.d)), False: _off_policy_noise(view)}
    for source in SIDES:
        census = _Census(view, source)
        for finding_id, codes in _RAISED.items():
            yield from census.raised(finding_id, codes)
        yield from census.impossible(float(noise[True][-1]) if len(noise[True]) else 0.0)
        yield from census.defaulted(noise)
    yield from _copied(view)


def _off_policy_noise(view: View) -> npt.NDArray[np.float64]:
    """Sorted |d| (nats) of every active token finite on both sides, whatever its weight versions."""
    parts = []
    for p in view.pairs:
        at = p.active & (p.rollout_class == classes.FINITE) & (p.training_class == classes.FINITE)
        parts.append(np.abs(p.training[at].astype(np.float64) - p.rollout[at]))
    return np.sort(np.concatenate(parts)) if parts else np.empty(0)


class _Census:
    """Active tokens of one side: values, classes and where each is."""

    def __init__(self, view: View, source: str) -> None:
        self.source = source
        self.ids: list[str] = []
        values: list[npt.NDArray[np.float32]] = []
        others: list[npt.NDArray[np.float32]] = []
        codes: list[npt.NDArray[np.uint8]] = []
        owner: list[npt.NDArray[np.int64]] = []
        at: list[npt.NDArray[np.int64]] = []
        paired: list[npt.NDArray[np.bool_]] = []
        for sample_id, active, pairs, value, other, code in _sides(view, source):
            where = np.flatnonzero(active)
            paired.append(pairs[where])
            values.append(value[where])
            others.append(other[where])
            codes.append(code[where])
            owner.append(np.full(len(where), len(self.ids), np.int64))
            at.append(where)
            self.ids.append(sample_id)
        empty = np.empty(0, np.int64)
        self.values = np.concatenate(values) if values else empty.astype(np.float32)
        self.others = np.concatenate(others) if others else empty.astype(np.float32)
        self.codes = np.concatenate(codes) if codes else empty.astype(np.uint8)
        self.paired = np.concatenate(paired) if paired else empty.astype(np.bool_)
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

    def impossible(self, reach: float) -> Iterable[Finding]:
        """Values above zero by more than rounding or the run's largest drift reaches, or too many of them."""
        hits = np.flatnonzero(self.codes == classes.IMPOSSIBLE)
        rounding = tolerance("logprob", "bfloat16").atol
        beyond = hits[self.values[hits] > max(rounding, reach)]
        if np.count_nonzero(self.values[hits] > rounding) > _IMPOSSIBLE_SHARE * len(self.codes):
            beyond = hits
        if beyond.size:
            yield self.finding("values.impossible", beyond)

    def defaulted(self, noise: dict[bool, npt.NDArray[np.float64]]) -> Iterable[Finding]:
        """Exact constants no drift of the run explains, on-policy and off-policy tokens each by their own drift.

        `noise` is sorted |d| by whether the tokens pair: the policies of two weight versions differ by more.
        """
        hits = np.flatnonzero(self.codes == classes.DEFAULTED)
        raised = [rows for pairs in noise if self._constant(rows := hits[self.paired[hits] == pairs], noise[pairs])]
        if raised:
            yield self.finding("values.defaulted", np.sort(np.concatenate(raised)))

    def _constant(self, hits: npt.NDArray[np.int64], noise: npt.NDArray[np.float64]) -> bool:
        """Whether there are ones among the hits, zeros farther off than any drift, or many of them."""
        gap = -self.others[hits]
        widest, typical = (float(noise[-1]), float(np.quantile(noise, _NOISE_QUANTILE))) if len(noise) else (0.0, 0.0)
        usual = max(-DEFAULTED_OTHER_BELOW, _NOISE_MARGIN * typical)
        reach = max(usual, widest)
        far = np.count_nonzero(gap > reach) >= 2 or (gap > _ALONE * reach).any()
        return bool(far or np.count_nonzero(gap > usual) >= _MANY or (self.values[hits] > 0).any())


_Floats = npt.NDArray[np.float32]
_Bools = npt.NDArray[np.bool_]
_Side = tuple[str, _Bools, _Bools, _Floats, _Floats, npt.NDArray[np.uint8]]


def _sides(view: View, source: str) -> Iterable[_Side]:
    """(sample id, active, paired, values, the other side's values, classes) of every sample, unpaired ones by bits."""
    paired = {p.sample.key for p in view.pairs}
    for p in view.pairs:
        other = p.training if source == "rollout" else p.rollout
        yield p.sample.sample_id, p.active, p.paired, getattr(p, source), other, getattr(p, f"{source}_class")
    for sample in view.pairing.samples:
        if sample.key in paired:
            continue
        series = _agreeing(view.pairing.series[sample.key][source])
        if series is not None:
            codes = classes.own_classes(series.values, series.recorded)
            codes[~series.present] = classes.MISSING
            absent = np.full(len(sample), np.nan, np.float32)
            active = sample.loss_mask.astype(np.bool_)
            yield sample.sample_id, active, np.zeros_like(active), series.values, absent, codes


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
