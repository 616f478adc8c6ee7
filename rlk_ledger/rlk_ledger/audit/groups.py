"""Is every sample of a group the same text? (group.duplicates)"""

from collections import defaultdict
from collections.abc import Iterable
from math import log

import numpy as np

from rlk_ledger.audit.finding import Finding
from rlk_ledger.audit.view import View
from rlk_ledger.history import Sample

_CHANCE = log(1e-6)
_MIN_TOKENS = 8
"""Without recorded log-probabilities, identical responses at least this long are no chance."""


def detect(view: View) -> Iterable[Finding]:
    """Groups whose sampled responses are all identical although sampling made that improbable."""
    groups: dict[tuple[int | None, str], list[Sample]] = defaultdict(list)
    for sample in view.pairing.samples:
        if sample.group_id is not None and sample.sampling.get("temperature") != 0:
            groups[sample.step, sample.group_id].append(sample)
    clones = [held for held in groups.values() if _all_equal(held) and _improbable(view, held)]
    if not clones:
        return
    seeds = {s.sampling.get("seed") for held in clones for s in held}
    where = {"groups": len(clones), "group_id": clones[0][0].group_id}
    evidence = {
        "groups_recorded": len(groups),
        "samples": sum(map(len, clones)),
        "distinct_seeds": len(seeds),
        "group_ids": [held[0].group_id for held in clones[:20]],
    }
    yield Finding("group.duplicates", where, evidence)


def _all_equal(samples: list[Sample]) -> bool:
    """Whether several samples (attempts of one sample are a repetition on purpose) hold the same tokens."""
    texts = {s.token_digest or s.response_token_ids.tobytes() for s in samples}
    known = texts.isdisjoint(("", b""))  # under redaction a sample may show neither
    return known and len(texts) == 1 and len({s.sample_id for s in samples}) > 1


def _improbable(view: View, samples: list[Sample]) -> bool:
    """Whether drawing the same response len - 1 more times has probability below 1e-6 by the engine's own numbers."""
    first = samples[0]
    series = view.pairing.series[first.key]["rollout"]
    values = series[0].values if series else np.empty(0, np.float32)
    finite = values[np.isfinite(values) & (values <= 0)]
    if len(finite) < len(first):
        return len(first) >= _MIN_TOKENS
    if _sharper_than_recorded(view, first):
        seeds = [s.sampling.get("seed") for s in samples]
        return len(first) >= _MIN_TOKENS and seeds[0] is not None and len(set(seeds)) == 1
    return float(finite.sum(dtype=np.float64)) * (len(samples) - 1) < _CHANCE


def _sharper_than_recorded(view: View, sample: Sample) -> bool:
    """Whether sampling was colder than the raw log-probabilities say, so that they understate repetition."""
    series = view.pairing.series[sample.key]["rollout"]
    body = view.history.contracts.get(series[0].first.contract_id, {}).get("body", {}) if series else {}
    temperature = sample.sampling.get("temperature")
    return body.get("mode") == "raw" and temperature is not None and temperature < 1.0
