"""Samples that workers could not score: left out of what is judged, and said to be."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np

from rlk_ledger.audit.finding import Finding
from rlk_ledger_replay.gates import Gate
from rlk_ledger_replay.preparation import Prepared
from rlk_ledger_replay.scores import Scores


def without_lost(prepared: Prepared, scores: Scores) -> tuple[Prepared, Scores, tuple[Finding, ...]]:
    """What is left when lost samples are taken out of tokens and scores, and the findings that say so.

    A sample that one pass lost is out of all of them. Where none is left, `blocked` says why.
    """
    tokens = prepared.tokens
    if not scores.lost or tokens is None:
        return prepared, scores, ()
    reason, count = Counter(scores.lost.values()).most_common(1)[0]
    samples = len(prepared.selection.pairs)
    if len(scores.lost) == samples:
        return replace(prepared, blocked=f"no sample could be scored; {count} of them because {reason}"), scores, ()
    left_N = np.flatnonzero(~np.isin(tokens.pair_N, list(scores.lost)))
    kept = replace(tokens, **{name: getattr(tokens, name)[left_N] for name in tokens.__dataclass_fields__})
    told = f"{len(scores.lost)} of {samples} samples could not be scored and are left out; {count} because {reason}"
    gate = Gate("evidence.scored", "unknown", told, {"samples": len(scores.lost)})
    step = f"Only the other samples were judged: {told}."
    finding = Finding("replay.failed", {"samples": len(scores.lost)}, {"reason": reason, "of": samples}, step)
    values = {name: values_N[left_N] for name, values_N in scores.values.items()}
    judged = replace(prepared, tokens=kept, gates=(*prepared.gates, gate))
    return judged, replace(scores, values=values), (finding,)
