"""What every detector reads: the history, its pairing and the compared tokens as flat arrays."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from rlk_ledger.audit.finding import Finding
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
    return View(history, pairing, pairing.pairs, flatten(pairing.pairs))


def flatten(pairs: list[PairedSample]) -> Tokens:
    """The compared tokens of `pairs`."""
    where = [np.flatnonzero(p.compared) for p in pairs]
    sizes = [len(w) for w in where]
    r = _join([p.rollout[w] for p, w in zip(pairs, where)], np.float64)
    t = _join([p.training[w] for p, w in zip(pairs, where)], np.float64)
    return Tokens(
        r=r,
        t=t,
        d=t - r,
        sample=np.repeat(np.arange(len(pairs), dtype=np.int64), sizes),
        position=_join(where, np.int64),
        rank=_join([p.rank[w] for p, w in zip(pairs, where)], np.int64),
        version=_join([p.version[w] for p, w in zip(pairs, where)], np.int64),
    )


def _join(parts: list[npt.NDArray[Any]], dtype: Any) -> npt.NDArray[Any]:
    return np.concatenate(parts).astype(dtype) if parts else np.empty(0, dtype)


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
