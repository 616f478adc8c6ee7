"""What two passes of one side, or both sides bit for bit, say. (layout.sensitive, off_policy.lag, drift.zero)"""

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from rlk_ledger.audit import backends
from rlk_ledger.audit.finding import Finding
from rlk_ledger.audit.view import View
from rlk_ledger_schemas.metrics import ZERO_DRIFT_FRACTION

Float64 = npt.NDArray[np.float64]


def detect(view: View) -> Iterable[Finding]:
    """Information that belongs beside drift; none of it is an error."""
    yield from _layouts(view)
    yield from _lag(view)
    yield from _zero(view)


def _layouts(view: View) -> Iterable[Finding]:
    """Later training passes of one version against the first, by the names of the two passes."""
    sizes: dict[tuple[str, str], list[Float64]] = defaultdict(list)
    layouts: dict[tuple[str, str], tuple[str | None, str | None]] = {}
    samples: dict[tuple[str, str], int] = defaultdict(int)
    for later in view.pairing.passes:
        if later.first is None:
            continue
        a, b = later.first.first, later.series.first
        if a.layout_id is not None and a.layout_id == b.layout_id:
            continue  # whatever made these passes differ, it was not their layout
        key = (a.pass_id or "first", b.pass_id or "later")
        both = later.first.present & later.series.present & later.sample.loss_mask.astype(np.bool_)
        sizes[key].append(np.abs(later.series.values[both].astype(np.float64) - later.first.values[both]))
        layouts.setdefault(key, (a.layout_id, b.layout_id))
        samples[key] += 1
    for key, parts in sizes.items():
        size = np.concatenate(parts)
        size = size[np.isfinite(size)]
        if not size.size or not size.any():
            continue
        evidence = {
            "layouts": list(layouts[key]),
            "samples": samples[key],
            "tokens": len(size),
            "differing_fraction": float((size > 0).mean()),
            "abs_difference_mean": float(size.mean()),
            "abs_difference_max": float(size.max()),
        }
        yield Finding("layout.sensitive", {"passes": list(key)}, evidence)


def _lag(view: View) -> Iterable[Finding]:
    by_lag: dict[int, list[Float64]] = defaultdict(list)
    for row in view.pairing.off_policy:
        by_lag[row.lag if row.lag is not None else 0].append(row.dlogp)
    for lag, parts in sorted(by_lag.items()):
        d = np.concatenate(parts)
        finite = d[np.isfinite(d)]
        evidence: dict[str, Any] = {"tokens": len(d), "samples": len(parts)}
        if finite.size:
            evidence["abs_dlogp_mean"] = float(np.abs(finite).mean())
        yield Finding("off_policy.lag", {"lag": lag, "count": len(d)}, evidence)


def _zero(view: View) -> Iterable[Finding]:
    equal = view.pairing.equal_fraction
    if equal is None or equal < ZERO_DRIFT_FRACTION:
        return
    evidence: dict[str, Any] = {"equal_fraction": equal, "determinism": backends.determinism(view)}
    evidence["deterministic_sides"] = list(backends.deterministic_sides(view))
    yield Finding("drift.zero", {"tokens": len(view.tokens), "equal_fraction": equal}, evidence)
