"""Does each engine hold the weights it says it holds? (weights.not_loaded, weights.differ, weights.skipped)"""

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from rlk_ledger.audit.finding import Finding
from rlk_ledger.audit.view import View
from rlk_ledger.history import Fact

Published = dict[str, list[Fact]]
"""What was published under each version: several times when a resumed job writes a version again."""


def detect(view: View) -> Iterable[Finding]:
    """Digests, adapters and skipped tensors of every load against what the trainer published under that version."""
    published: Published = defaultdict(list)
    for fact in view.history.of("weights.published"):
        published[fact.fields["weight_version"]].append(fact)
    loads: dict[str, list[Fact]] = defaultdict(list)
    for fact in view.history.of("weights.loaded"):
        loads[fact.fields["engine"]].append(fact)
    for engine, facts in loads.items():
        yield from _engine(engine, facts, published)
    yield from _skipped(published, loads)
    yield from _never_loaded(view, published, loads)


def _engine(engine: str, loads: list[Fact], published: Published) -> Iterable[Finding]:
    stale: list[tuple[Fact, str]] = []
    differ: list[Fact] = []
    unheld: list[Fact] = []
    unknown: list[Fact] = []
    held: dict[str, str] = {}
    for load in loads:
        version, digest = load.fields["weight_version"], load.fields["digest"]
        if version not in published:
            continue
        source = _source(load, published)
        if not _same_algorithm(digest, source.fields["digest"]):
            unknown.append(load)
        elif digest != source.fields["digest"]:
            if digest in held and held[digest] != version:
                stale.append((load, held[digest]))
            elif not load.fields.get("skipped") and not source.fields.get("skipped"):
                differ.append(load)
        elif _missing_adapters(load, source):
            unheld.append(load)
        held.setdefault(digest, version)
    if stale or unheld:
        yield _not_loaded(engine, stale, unheld, published)
    if differ:
        yield _differ(engine, differ, published)
    if unknown and not any(
        _same_algorithm(f.fields["digest"], p.fields["digest"]) for f, p in _known(loads, published)
    ):
        yield Finding(
            "evidence.incomplete",
            {"engine": engine, "field": "digest", "version": unknown[0].fields["weight_version"]},
            {"reason": "published and loaded digests use different algorithms and cannot be compared"},
            "Record the same digest scheme on both sides.",
        )


def _source(load: Fact, published: Published) -> Fact:
    """The publication a load is judged by: the one it matches, else the last of its version."""
    facts = published[load.fields["weight_version"]]
    return next((f for f in facts if f.fields["digest"] == load.fields["digest"]), facts[-1])


def _known(loads: list[Fact], published: Published) -> list[tuple[Fact, Fact]]:
    return [(f, _source(f, published)) for f in loads if f.fields["weight_version"] in published]


def _same_algorithm(left: str, right: str) -> bool:
    return left.partition(":")[0] == right.partition(":")[0]


def _missing_adapters(load: Fact, source: Fact) -> list[str]:
    have = {a["name"]: a["digest"] for a in load.fields.get("adapters") or ()}
    want = {a["name"]: a["digest"] for a in source.fields.get("adapters") or ()}
    return sorted(
        name
        for name, digest in want.items()
        if name not in have or (_same_algorithm(have[name], digest) and have[name] != digest)
    )


def _not_loaded(engine: str, stale: list[tuple[Fact, str]], unheld: list[Fact], published: Published) -> Finding:
    first = stale[0][0] if stale else unheld[0]
    version = first.fields["weight_version"]
    source = _source(first, published)
    evidence: dict[str, Any] = {
        "published_digest": source.fields["digest"],
        "loaded_digest": first.fields["digest"],
        "versions": [fact.fields["weight_version"] for fact, _ in stale]
        or [f.fields["weight_version"] for f in unheld],
        "missing_adapters": _missing_adapters(first, source),
        "tensor_count": {"published": source.fields["tensor_count"], "loaded": first.fields["tensor_count"]},
    }
    if stale:
        evidence["same_bytes_as_version"] = stale[0][1]
    return Finding("weights.not_loaded", {"engine": engine, "version": version}, evidence)


def _differ(engine: str, facts: list[Fact], published: Published) -> Finding:
    first = facts[0]
    version = first.fields["weight_version"]
    source = _source(first, published)
    differing = _differing_tensors(first, source)
    evidence = {
        "published_digest": source.fields["digest"],
        "loaded_digest": first.fields["digest"],
        "what": first.fields.get("what") or "received",
        "versions": [fact.fields["weight_version"] for fact in facts],
        "tensor_count": {"published": source.fields["tensor_count"], "loaded": first.fields["tensor_count"]},
        "differing_tensors": differing[:50],
    }
    step = ""
    if differing:
        named = ", ".join(differing[:3]) + (f" and {len(differing) - 3} more" if len(differing) > 3 else "")
        step = f"Look at how {engine} takes {named}: it holds other values there than were published. Then send again."
    return Finding("weights.differ", {"engine": engine, "version": version}, evidence, step)


def _differing_tensors(load: Fact, source: Fact) -> list[str]:
    have = {t["name"]: t["digest"] for t in load.fields.get("tensors") or ()}
    want = {t["name"]: t["digest"] for t in source.fields.get("tensors") or ()}
    if not have or not want:
        return []
    return sorted(name for name in have.keys() | want.keys() if have.get(name) != want.get(name))


def _skipped(published: Published, loads: dict[str, list[Fact]]) -> Iterable[Finding]:
    """One finding per holder (the trainer, each engine) that left tensors out."""
    holders = [
        ("side", "training", [f for held in published.values() for f in held]),
        *(("engine", e, facts) for e, facts in loads.items()),
    ]
    for key, name, facts in holders:
        short = [fact for fact in facts if fact.fields.get("skipped")]
        if not short:
            continue
        tensors = sorted({tensor for fact in short for tensor in fact.fields["skipped"]})
        versions = [fact.fields["weight_version"] for fact in short]
        where = {key: name, "version": versions[0], "tensors": tensors}
        yield Finding("weights.skipped", where, {"versions": versions, "tensor_count": short[0].fields["tensor_count"]})


def _never_loaded(view: View, published: Published, loads: dict[str, list[Fact]]) -> Iterable[Finding]:
    """Versions that samples claim and that an engine which records its loads never recorded loading."""
    order = {version: i for i, version in enumerate(published)}
    for engine, facts in loads.items():
        loaded = {fact.fields["weight_version"] for fact in facts}
        first = min((order[v] for v in loaded if v in order), default=None)
        claimed = {v for s in view.pairing.samples if s.engine == engine for v, a, b in s.weight_spans if b > a}
        unseen = [v for v in claimed - loaded if v in order and first is not None and order[v] > first]
        missing = sorted(unseen, key=lambda v: order[v])
        if missing:
            yield Finding(
                "evidence.incomplete",
                {"engine": engine, "version": missing[0], "field": "weights.loaded"},
                {"reason": "samples claim versions this engine never recorded loading", "versions": missing},
                "Record weights.loaded for every sync of this engine.",
            )
