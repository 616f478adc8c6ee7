"""Did one side renormalise over the sampled support and the other not? (sampling.support)

Renormalising divides a probability by the kept mass m: with rollout renormalised t - r = log m, with training
renormalised it is -log m. Where the kept mass was recorded the shift is compared with it sample by sample; where it was
not, a shift of one sign that stays within what the declared top-p allows is named with that reservation.
"""

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from rlk_ledger.audit.finding import Finding
from rlk_ledger.audit.view import View

Float64 = npt.NDArray[np.float64]

_MIN_SAMPLES = 8
_MIN_SHIFT = 0.01
_GAIN = 0.5
_SHARE = 0.9
_SLACK = 1.1


def detect(view: View) -> Iterable[Finding]:
    """The kept-mass shift, measured or within the declared top-p."""
    if len(view.tokens) == 0:
        return
    found = _by_kept_mass(view) or _by_top_p(view)
    if found is not None:
        yield found


def _by_kept_mass(view: View) -> Finding | None:
    rows = [(i, p.sample.kept_mass) for i, p in enumerate(view.pairs)]
    held = {i: mass for i, mass in rows if mass is not None and len(mass) == len(view.pairs[i].sample)}
    if len(held) < _MIN_SAMPLES:
        return None
    keep = np.isin(view.tokens.sample, list(held))
    owner, position, d = view.tokens.sample[keep], view.tokens.position[keep], view.tokens.d[keep]
    mass = _gather(held, owner, position)
    shift = np.log(np.clip(mass.astype(np.float64), 1e-6, 1.0))
    if not len(d) or float(np.abs(shift).mean()) < _MIN_SHIFT:
        return None
    for side, expected in (("rollout", shift), ("training", -shift)):
        before, after = _per_sample(owner, np.abs(d)), _per_sample(owner, np.abs(d - expected))
        better = after < _GAIN * before
        if len(before) >= _MIN_SAMPLES and better.mean() >= _SHARE:
            evidence = {
                "from": "kept_mass",
                "mean_log_kept_mass": float(shift.mean()),
                "mean_dlogp": float(d.mean()),
                "mean_abs_dlogp": float(np.abs(d).mean()),
                "mean_abs_dlogp_after_correction": float(np.abs(d - expected).mean()),
                "samples_explained": int(better.sum()),
            }
            return _finding(view, side, len(before), evidence)
    return None


def _gather(held: dict[int, Any], owner: npt.NDArray[np.int64], position: npt.NDArray[np.int64]) -> Float64:
    starts, at, parts = np.full(max(held) + 1, 0, np.int64), 0, []
    for index, mass in held.items():
        starts[index] = at
        at += len(mass)
        parts.append(mass)
    return np.asarray(np.concatenate(parts)[starts[owner] + position], np.float64)


def _per_sample(owner: npt.NDArray[np.int64], x: Float64) -> Float64:
    count = np.bincount(owner)
    return np.asarray((np.bincount(owner, weights=x) / np.maximum(count, 1))[count > 0], np.float64)


def _by_top_p(view: View) -> Finding | None:
    """Without kept mass: one sign nearly everywhere, and no further than log top_p."""
    bounds = np.array([_bound(p.sample.sampling) for p in view.pairs])
    keep = np.isfinite(bounds[view.tokens.sample]) & (bounds[view.tokens.sample] < 0)
    owner, d = view.tokens.sample[keep], view.tokens.d[keep]
    mean = _per_sample(owner, d)
    if len(mean) < _MIN_SAMPLES or abs(float(np.median(d))) < _MIN_SHIFT:
        return None
    for side, sign in (("rollout", -1.0), ("training", 1.0)):
        inside = np.abs(d) <= _SLACK * np.abs(bounds[owner]) + _MIN_SHIFT
        one_sign = float((sign * d > 0).mean())
        if one_sign >= 0.95 and inside.mean() >= _SHARE and float((sign * mean > 0).mean()) >= 0.99:
            evidence = {
                "from": "sampling.top_p; kept_mass was not recorded",
                "share_of_tokens_with_this_sign": one_sign,
                "mean_dlogp": float(d.mean()),
                "log_top_p": float(bounds[owner].mean()),
            }
            return _finding(view, side, len(mean), evidence)
    return None


def _bound(sampling: dict[str, Any]) -> float:
    top_p = sampling.get("top_p")
    return float(np.log(top_p)) if top_p is not None and 0.0 < top_p < 1.0 else np.nan


def _finding(view: View, side: str, samples: int, evidence: dict[str, Any]) -> Finding:
    where = {"side": side, "samples": samples, "sample_id": view.pairs[0].sample.sample_id}
    return Finding("sampling.support", where, evidence)
