"""Recorded routes of a mixture of experts: which experts served each token, as the rollout recorded them.

N inputs of a sample (all tokens but the last, which is sampled and never fed), L layers with experts, K experts of a
token. An input without a route has -1: the reference's own router chooses there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from rlk_ledger.history import Sample
from rlk_ledger_replay.model_settings import ExpertConfig
from rlk_ledger_schemas.fingerprints import sha256

Int32 = NDArray[np.int32]


@dataclass(frozen=True)
class Coverage:
    """(token, layer) pairs of the scored samples, those with a recorded route, and those where routers agree with it.

    Agreeing: the reference's router, given the hidden states that follow from the recorded routes before it, chose the
    same experts in any order. None before scoring.
    """

    pairs: int
    covered: int
    agreeing: int | None = None

    def as_dict(self) -> dict[str, float | int | None]:
        """Plain values, with both shares."""
        agreement = None if self.agreeing is None or not self.covered else self.agreeing / self.covered
        shares = {"coverage": self.covered / self.pairs if self.pairs else None, "agreement": agreement}
        return {"pairs": self.pairs, "covered": self.covered, "agreeing": self.agreeing, **shares}


def routes_of(sample: Sample) -> Int32 | None:
    """Recorded routes of a sample, int32 [N, L, K], -1 where an input has none; None where none were recorded.

    An array that does not have the recorded digest, or is no [rows, L, K] of at most N rows, is none.
    """
    told, flat = sample.routed_experts, sample.routes
    layers, top_k = told.get("layers"), told.get("top_k")
    if flat is None or not layers or not top_k or sample.prompt_token_ids is None or len(flat) % (layers * top_k):
        return None
    if told.get("digest") and told["digest"] != sha256(np.ascontiguousarray(flat, dtype="<i4").tobytes()):
        return None
    rows = flat.astype(np.int32).reshape(-1, layers, top_k)
    inputs = len(sample.prompt_token_ids) + len(sample.response_token_ids) - 1
    if len(rows) > inputs:
        return None
    whole = np.full((inputs, layers, top_k), -1, dtype=np.int32)
    whole[: len(rows)] = rows
    return whole


def why_unroutable(samples: Iterable[Sample], experts: ExpertConfig) -> str | None:
    """Why the routes of some sample do not fit the model, or None."""
    for sample in samples:
        routes = routes_of(sample)
        if routes is None:
            continue
        if routes.shape[1:] != (len(experts.layers), experts.top_k):
            have, want = list(routes.shape[1:]), [len(experts.layers), experts.top_k]
            return f"routes of sample {sample.sample_id} are {have} layers and experts a token, the model has {want}"
        if routes.max(initial=-1) >= experts.count:
            return f"routes of sample {sample.sample_id} name an expert outside the model's {experts.count}"
    return None


def counted(given: Sequence[Int32], chosen: Sequence[torch.Tensor]) -> list[tuple[int, int]]:
    """(covered, agreeing) of each sample. given, chosen: [N, L, K], recorded and what the routers chose."""
    out = []
    for routes_NLK, chosen_NLK in zip(given, chosen, strict=True):
        covered_NL = (routes_NLK >= 0).all(axis=-1)
        same_NL = (np.sort(routes_NLK, axis=-1) == np.sort(chosen_NLK.numpy(), axis=-1)).all(axis=-1)
        out.append((int(covered_NL.sum()), int((covered_NL & same_NL).sum())))
    return out
