"""Did both sides score the same tokens under the same mask? (tokens.differ, mask.differs, samples.ambiguous)"""

from collections.abc import Iterable

import numpy as np

from rlk_ledger.audit.finding import Finding
from rlk_ledger.audit.view import View
from rlk_ledger.history import Sample
from rlk_ledger.series import Series


def detect(view: View) -> Iterable[Finding]:
    """Digests and token ids of each side against the sample's."""
    by_source: dict[str, list[tuple[Sample, Series]]] = {}
    masks: dict[str, list[Sample]] = {}
    for sample, series in view.pairing.disagreeing:
        if series.token_differs or series.excess:
            by_source.setdefault(series.source, []).append((sample, series))
        if series.mask_differs:
            masks.setdefault(series.source, []).append(sample)
    for source, rows in by_source.items():
        yield _tokens(source, rows)
    for source, samples in masks.items():
        yield _masks(source, samples)
    yield from _own_digests(view)
    yield from _remasked(view)
    yield from _keys(view)
    if view.pairing.ambiguous:
        ids = view.pairing.ambiguous
        yield Finding("samples.ambiguous", {"samples": len(ids), "sample_id": ids[0]}, {"sample_ids": ids[:20]})


def _tokens(source: str, rows: list[tuple[Sample, Series]]) -> Finding:
    found = [(index, sample) for sample, series in rows if (index := _first_index(sample, series)) is not None]
    where: dict[str, object] = {"source": source, "samples": len(rows)}
    if found:
        index, sample = min(found, key=lambda pair: pair[0])
        where |= {"first_index": index, "sample_id": sample.sample_id}
    else:
        where["sample_id"] = rows[0][0].sample_id
    first, series = rows[0]
    evidence = {
        "sample_token_digest": first.token_digest,
        "scored_token_digest": series.first.token_digest,
        "values_beyond_the_last_token": sum(s.excess for _, s in rows),
        "sample_ids": [sample.sample_id for sample, _ in rows[:20]],
        "first_index_known_for": len(found),
    }
    return Finding("tokens.differ", where, evidence)


def _first_index(sample: Sample, series: Series) -> int | None:
    """The first response position where the scored ids differ; None when only digests were recorded."""
    ids = series.first.token_ids
    if ids is None or not len(sample.response_token_ids):
        return len(sample) if series.excess and not series.token_differs else None
    shared = min(len(ids), len(sample.response_token_ids))
    differing = np.flatnonzero(ids[:shared] != sample.response_token_ids[:shared])
    return int(differing[0]) if differing.size else shared


def _masks(source: str, samples: list[Sample]) -> Finding:
    where = {"source": source, "samples": len(samples), "sample_id": samples[0].sample_id}
    return Finding(
        "mask.differs",
        where,
        {"sample_ids": [s.sample_id for s in samples[:20]], "sample_mask_digest": samples[0].mask_digest},
    )


def _own_digests(view: View) -> Iterable[Finding]:
    """A sample whose recorded digest is not that of its own recorded array."""
    samples = view.pairing.samples
    tokens = [s for s in samples if s.own_token_digest and _differs(s.token_digest, s.own_token_digest)]
    masks = [s for s in samples if _differs(s.mask_digest, s.own_mask_digest)]
    if tokens:
        yield Finding(
            "tokens.differ",
            {"source": "rollout", "samples": len(tokens), "sample_id": tokens[0].sample_id},
            {"recorded": tokens[0].token_digest, "of_the_recorded_ids": tokens[0].own_token_digest},
        )
    if masks:
        yield Finding(
            "mask.differs",
            {"source": "rollout", "samples": len(masks), "sample_id": masks[0].sample_id},
            {"recorded": masks[0].mask_digest, "of_the_recorded_mask": masks[0].own_mask_digest},
        )


def _remasked(view: View) -> Iterable[Finding]:
    """Samples recorded again with the same tokens under another loss mask."""
    rows = view.pairing.remasked
    if rows:
        where = {"source": "rollout", "samples": len(rows), "sample_id": rows[0].sample_id}
        evidence = {"reason": "one sample was recorded twice, with two loss masks; the first one was used"}
        yield Finding("mask.differs", where, evidence | {"sample_ids": [s.sample_id for s in rows[:20]]})


def _keys(view: View) -> Iterable[Finding]:
    """Processes of one run that redact in different ways: what they recorded of tokens was not compared."""
    keys = sorted({s.token_key for s in view.history.samples} | {s.token_key for s in view.history.scores})
    if len(keys) > 1:
        yield Finding(
            "evidence.incomplete",
            {"field": "redaction", "ways": keys},
            {"reason": "processes redact in different ways, or with different keys: equal tokens look different"},
            "Give every process of a run one redaction, and every one that hashes the same RLK_REDACTION_KEY.",
        )
    dropped = [s for s in view.pairing.samples if s.token_key == "drop"]
    if dropped:
        yield Finding("tokens.redacted", {"samples": len(dropped), "sample_id": dropped[0].sample_id}, {})


def _differs(recorded: str, own: str) -> bool:
    same_algorithm = recorded.partition(":")[0] == own.partition(":")[0]
    return same_algorithm and recorded != own
