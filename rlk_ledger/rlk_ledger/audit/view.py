"""What every detector reads: the history, its pairing and the compared tokens as flat arrays."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from rlk_ledger.audit.finding import Finding
from rlk_ledger.columns import Columns
from rlk_ledger.history import History
from rlk_ledger.pairs import PairedSample, Pairing, pair

Float64 = npt.NDArray[np.float64]
Index = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Tokens:
    """Compared tokens (paired, active, finite on both sides), samples one after the other.

    `r`, `t` are float64[n] in nats, `d = t - r`; `sample` (int64[n]) indexes `View.pairs`, `position` (int64[n]) is the
    response position, `rank` (int64[n]) the training shard rank or -1.
    """

    r: Float64
    t: Float64
    d: Float64
    sample: Index
    position: Index
    rank: Index
    version: Index

    def __len__(self) -> int:
        return len(self.d)


@dataclass(frozen=True, slots=True)
class View:
    """One run as detectors see it."""

    history: History
    pairing: Pairing
    pairs: list[PairedSample]
    tokens: Tokens

    def place(self, index: int, position: int) -> dict[str, Any]:
        """Where a token is: sample, position, token id, engine, weight version, ranks, contracts, layout."""
        return place(self.pairing, self.pairs[index], position)


Detector = Callable[[View], Iterable[Finding]]


def make_view(history: History, pairing: Pairing | None = None) -> View:
    """The view of a history; `pairing` is reused when given."""
    pairing = pairing or pair(history)
    return View(history, pairing, pairing.pairs, flatten(pairing.columns))


def flatten(columns: Columns) -> Tokens:
    """The compared tokens of a run's columns."""
    rows = np.flatnonzero(columns.compared)
    r, t = columns.rollout[rows].astype(np.float64), columns.training[rows].astype(np.float64)
    return Tokens(
        r=r,
        t=t,
        d=t - r,
        sample=columns.owner[rows],
        position=columns.position(rows),
        rank=columns.rank[rows].astype(np.int64),
        version=columns.version[rows].astype(np.int64),
    )


def place(pairing: Pairing, pair_: PairedSample, position: int) -> dict[str, Any]:
    """Everything that locates one token of a paired sample."""
    sample, score = pair_.sample, pair_.source_of(position).first
    version, rank = int(pair_.version[position]), int(pair_.rank[position])
    tokens = sample.response_token_ids
    writers = pairing.history.writers
    return {
        "run_id": pairing.history.run_id,
        "sample_id": sample.sample_id,
        "position": int(position),
        "token_id": int(tokens[position]) if position < len(tokens) else None,
        "step": sample.step,
        "group_id": sample.group_id,
        "engine": sample.engine,
        "rollout_rank": writers.get(sample.writer_id, {}).get("rank"),
        "training_rank": writers.get(score.writer_id, {}).get("rank"),
        "shard_rank": rank if rank >= 0 else None,
        "weight_version": pairing.versions[version] if version >= 0 else None,
        "rollout_contract": pair_.rollout_series.first.contract_id,
        "training_contract": score.contract_id,
        "pass_id": score.pass_id,
        "layout_id": score.layout_id,
    }
