"""The tokens of all pairs of a run as flat columns, and the value classes that only the whole run tells.

Samples stand one after the other in the order of the pairs; a pair's own arrays of classes are slices of the columns.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from rlk_ledger import classes

if TYPE_CHECKING:
    from rlk_ledger.pairs import PairedSample

Bool = npt.NDArray[np.bool_]
Index = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Columns:
    """One entry a token of a pair, whether it pairs or not.

    `edges` (int64[pairs + 1]) are the first tokens of the pairs, `owner` (int64[n]) numbers them; `rollout`, `training`
    (float32[n]) are in nats, the classes uint8[n]; `version` (int32[n]), `rank` and `origin` (int16[n]) are those of
    `PairedSample`. `compared` (bool[n]) marks what enters drift: paired, active and finite on both sides.
    """

    edges: Index
    owner: Index
    rollout: npt.NDArray[np.float32]
    training: npt.NDArray[np.float32]
    rollout_class: npt.NDArray[np.uint8]
    training_class: npt.NDArray[np.uint8]
    active: Bool
    paired: Bool
    compared: Bool
    version: npt.NDArray[np.int32]
    rank: npt.NDArray[np.int16]
    origin: npt.NDArray[np.int16]
    equal_fraction: float | None

    def rows(self) -> Index:
        """The compared tokens (int64[m]), samples in order; of one sample by weight version, then by training pass."""
        rows = np.flatnonzero(self.compared)
        owner, version, origin = self.owner[rows], self.version[rows], self.origin[rows]
        inside = owner[1:] == owner[:-1]
        falls = (version[1:] < version[:-1]) | ((version[1:] == version[:-1]) & (origin[1:] < origin[:-1]))
        return rows[np.lexsort((origin, version, owner))] if (inside & falls).any() else rows

    def position(self, rows: Index) -> Index:
        """The response positions (int64[m]) of these tokens."""
        return np.asarray(rows - self.edges[self.owner[rows]], np.int64)


def join(pairs: "Sequence[PairedSample]") -> Columns:
    """The columns of `pairs`; fills the value classes of each."""
    lengths = [len(p.sample) for p in pairs]
    edges = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)])
    owner = np.repeat(np.arange(len(pairs), dtype=np.int64), lengths)
    active, paired = _joined([p.active for p in pairs], np.bool_), _joined([p.paired for p in pairs], np.bool_)
    rollout, left = _side([(p.rollout, p.rollout_series.present, p.rollout_series.recorded) for p in pairs], active)
    training, right = _side([(p.training, p.training_present, p.training_recorded) for p in pairs], active)
    crossed = classes.cross_classes(rollout, training, left, right, active, owner)
    for p, start, end in zip(pairs, edges[:-1].tolist(), edges[1:].tolist()):
        p.rollout_class, p.training_class = crossed.rollout[start:end], crossed.training[start:end]
    finite = (crossed.rollout == classes.FINITE) & (crossed.training == classes.FINITE)
    return Columns(
        edges=edges,
        owner=owner,
        rollout=rollout,
        training=training,
        rollout_class=crossed.rollout,
        training_class=crossed.training,
        active=active,
        paired=paired,
        compared=paired & active & finite,
        version=_joined([p.version for p in pairs], np.int32),
        rank=_joined([p.rank for p in pairs], np.int16),
        origin=_joined([p.origin for p in pairs], np.int16),
        equal_fraction=crossed.equal_fraction,
    )


def _side(parts: list[tuple[Any, Any, Any]], active: Bool) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.uint8]]:
    """(values, classes by their own bits) of one side."""
    values = _joined([part[0] for part in parts], np.float32)
    present, recorded = _joined([part[1] for part in parts], np.bool_), _joined([part[2] for part in parts], np.uint8)
    seen = active & present
    sentinels = classes.recurring_sentinels(values if seen.all() else values[seen])
    own = classes.own_classes(values, recorded, sentinels)
    own[~present] = classes.MISSING
    return values, own


def _joined(parts: list[Any], dtype: Any) -> npt.NDArray[Any]:
    return np.concatenate(parts) if parts else np.empty(0, dtype)
