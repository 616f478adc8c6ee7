"""Drift by any recorded dimension, and the worst tokens with their place."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from rlk_ledger import metrics
from rlk_ledger.audit import dimensions, measured
from rlk_ledger.audit.view import View
from rlk_ledger_schemas.errors import UsageError

Index = npt.NDArray[np.int64]

SHORT = {
    "cache": "cache.hit",
    "chunk": "prefill.chunked",
    "length": "length.response",
    "rank": "training.writer.rank",
    "shard": "training.shard_rank",
    "layout": "layout_id",
    "group": "group_id",
    "sample": "sample_id",
    "version": "weight_version",
    "position": "position.third",
}
"""Short names of --by for dimensions whose own name is long."""


def names(view: View) -> list[str]:
    """Every dimension this run records."""
    own = ["step", "group_id", "sample_id", "weight_version"]
    found = [d.name for d in (*dimensions.between(view, constant=True), *dimensions.within(view))]
    return [*own, *sorted(set(found) - set(own))]


def overall(view: View) -> metrics.Drift:
    """Every metric over the run's paired active tokens; what is no measurement is counted beside them."""
    return measured(view)


def by(view: View, dims: Sequence[str]) -> list[dict[str, Any]]:
    """One row per combination of levels of `dims`: the levels, then the drift of its compared tokens.

    Dimensions are those of `names`, or a short name. Rows are ordered by level. Raises UsageError for an unknown one.
    """
    coded = [_codes(view, SHORT.get(name, name)) for name in dims]
    tokens = view.tokens
    key = np.zeros(len(tokens), np.int64)
    for codes, labels in coded:
        key = np.unique(key * (len(labels) + 1) + codes + 1, return_inverse=True)[1].reshape(-1)
    rows = []
    r, t = tokens.r.astype(np.float32), tokens.t.astype(np.float32)
    order = np.argsort(key, kind="stable")
    edges = np.flatnonzero(np.diff(key[order])) + 1
    for at in np.split(order, edges) if len(order) else []:
        levels = {}
        for name, (codes, labels) in zip(dims, coded):
            code = int(codes[at[0]])
            levels[name] = labels[code] if code >= 0 else None
        rows.append({"level": levels, **metrics.measure(r[at], t[at], sample=tokens.sample[at]).to_dict()})
    return rows


def _codes(view: View, name: str) -> tuple[Index, list[Any]]:
    """(level code of each compared token, levels) of one dimension."""
    owner = view.tokens.sample
    if name in ("step", "group_id", "sample_id"):
        values = [getattr(p.sample, name) for p in view.pairs]
        levels = sorted({v for v in values if v is not None})
        index = {v: i for i, v in enumerate(levels)}
        return np.array([index.get(v, -1) for v in values], np.int64)[owner], levels
    if name == "weight_version":
        return view.tokens.version, list(view.pairing.versions)
    for dimension in dimensions.between(view, constant=True):
        if dimension.name == name:
            return dimension.codes[owner], list(dimension.labels)
    for dimension in dimensions.within(view):
        if dimension.name == name:
            return dimension.codes, list(dimension.labels)
    held = [one for one in names(view) if ".writer." not in one]
    raise UsageError(
        f"no dimension {name!r} was recorded in this run; there are {', '.join(held)}, and the fields of "
        "writer.opened as rollout.writer.NAME and training.writer.NAME."
    )


def worst(view: View, count: int) -> list[dict[str, Any]]:
    """The `count` compared tokens with the largest |d|, each with its whole place."""
    tokens = view.tokens
    order = np.argsort(-np.abs(tokens.d), kind="stable")[:count]
    return [
        {
            **view.place(int(tokens.sample[i]), int(tokens.position[i])),
            "rollout": float(tokens.r[i]),
            "training": float(tokens.t[i]),
            "dlogp": float(tokens.d[i]),
        }
        for i in order.tolist()
    ]
