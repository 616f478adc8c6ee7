"""Was everything seen that should have been? (coverage.*, evidence.*, metadata.defaulted, routes.incomplete)"""

from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import Any

from rlk_ledger.audit.finding import Finding
from rlk_ledger.audit.view import View
from rlk_ledger.pairs import SIDES


def detect(view: View) -> Iterable[Finding]:
    """Coverage of active tokens, shards, lost events, ranks, defaulted metadata and routes."""
    yield from _pruned(view)
    yield from _active(view)
    yield from _unobserved(view)
    yield from _shards(view)
    yield from _replicas(view)
    yield from _lost(view)
    yield from _roster(view)
    yield from _unversioned(view)
    yield from _defaulted(view)
    yield from _routes(view)


def _pruned(view: View) -> Iterable[Finding]:
    """What was deleted on purpose, where it was about samples: of everything else the tombstones state what counts."""
    pruned = view.history.pruned
    if pruned is None or not {"rollout.sample", "logprobs", "prompt.recorded"} & pruned.types.keys():
        return
    where = {"segments": pruned.segments, "first_step": pruned.first_step, "last_step": pruned.last_step}
    evidence: dict[str, Any] = {
        "events": pruned.events,
        "samples": pruned.types.get("rollout.sample", 0),
        "scores": pruned.types.get("logprobs", 0),
        "by": list(pruned.by),
        "reasons": list(pruned.reasons),
    }
    yield Finding("evidence.pruned", where, evidence)


def _active(view: View) -> Iterable[Finding]:
    samples = view.pairing.samples
    if not samples and not view.pairing.ambiguous:
        yield Finding(
            "evidence.incomplete",
            {"field": "rollout.sample"},
            {"reason": "the run holds no samples", "scores": len(view.history.scores)},
            "Record rollout.sample events; without samples nothing can be compared."
            if view.history.pruned is None
            else "They were pruned, or never recorded; without samples nothing can be compared.",
        )
    elif samples and not any(s.loss_mask.any() for s in samples):
        yield Finding("coverage.zero_active_tokens", {"samples": len(samples)}, {"tokens": sum(map(len, samples))})
    if view.pairing.orphans:
        score = view.pairing.orphans[0]
        yield Finding(
            "evidence.incomplete",
            {"field": "sample_id", "sample_id": score.sample_id, "source": score.source},
            {"reason": "scores that belong to no recorded sample, or to no one attempt of it"}
            | {"scores": len(view.pairing.orphans)},
            "Record the rollout.sample these scores belong to, and `attempt` where a sample has several."
            if view.history.pruned is None
            else "Their samples may be among what was pruned; else record the rollout.sample these scores belong to.",
        )


def _unobserved(view: View) -> Iterable[Finding]:
    active = sum(int(s.loss_mask.sum()) for s in view.pairing.samples)
    for source in SIDES:
        rows = [u for u in view.pairing.unobserved if u.source == source and not u.partial]
        if rows:
            tokens = sum(u.tokens for u in rows)
            where = {"source": source, "tokens": tokens, "sample_id": rows[0].sample.sample_id}
            evidence = {
                "samples": len(rows),
                "active_tokens": active,
                "coverage": 1.0 - tokens / active,
                "sample_ids": [u.sample.sample_id for u in rows[:20]],
                "steps": sorted({u.sample.step for u in rows if u.sample.step is not None})[:50],
            }
            yield Finding("coverage.unobserved", where, evidence)


def _shards(view: View) -> Iterable[Finding]:
    by_source: dict[str, list[Any]] = defaultdict(list)
    for missing in view.pairing.missing_shards:
        by_source[missing.source].append(missing)
    for source, rows in by_source.items():
        ranks = sorted({rank for m in rows for rank in m.missing_ranks})
        where = {"source": source, "missing_ranks": ranks}
        evidence = {
            "samples": len(rows),
            "tokens": sum(m.tokens for m in rows),
            "world_sizes": sorted({size for m in rows for size in m.world_sizes}),
            "sample_ids": [m.sample.sample_id for m in rows[:20]],
        }
        yield Finding("evidence.shards_missing", where, evidence)


def _replicas(view: View) -> Iterable[Finding]:
    rows = view.pairing.replicas
    if not rows:
        return
    first = rows[0]
    ranks = [view.history.writers.get(w, {}).get("rank") for w in first.writers]
    where = {
        "source": first.source,
        "ranks": ranks,
        "sample_id": first.sample.sample_id,
        "position": first.position,
    }
    evidence = {"samples": len({r.sample.key for r in rows}), "writers": list(first.writers)}
    yield Finding("replicas.differ", where, evidence)


def _lost(view: View) -> Iterable[Finding]:
    gaps: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for fact in view.history.of("gap"):
        gaps[fact.writer_id].append(fact.fields)
    for writer, rows in gaps.items():
        where = {"writer": writer, "first": rows[0]["first"], "last": rows[-1]["last"], "kind": rows[0]["kind"]}
        lost = sum(r["last"] - r["first"] + 1 for r in rows)
        evidence = {"events": lost, "gaps": len(rows), "reason": rows[0]["reason"]}
        yield Finding("evidence.incomplete", where, evidence)
    for fact in view.history.of("writer.lost"):
        if fact.fields.get("bytes_left"):
            where = {"writer": fact.fields["writer"], "last_seq": fact.fields.get("last_seq")}
            evidence = {"bytes_left": fact.fields["bytes_left"], "reason": fact.fields["reason"]}
            yield Finding("evidence.incomplete", where, evidence)


def _roster(view: View) -> Iterable[Finding]:
    """Ranks the run declared and that never opened a writer."""
    roles: dict[str, int] = {}
    for fact in view.history.of("run.opened"):
        roles = fact.fields.get("roles") or roles
    seen: dict[str, set[int]] = defaultdict(set)
    for opened in view.history.writers.values():
        seen[opened["role"]].add(opened["rank"])
    for role, size in roles.items():
        missing = sorted(set(range(size)) - seen[role])
        if missing and role in (*SIDES, "reference"):
            yield Finding(
                "evidence.incomplete",
                {"role": role, "missing_ranks": missing},
                {"declared": size, "opened": len(seen[role]), "reason": "declared ranks that never recorded"},
                "Check that every declared rank calls init; what it did is not in the record.",
            )


def _unversioned(view: View) -> Iterable[Finding]:
    rows = view.pairing.unversioned
    if rows:
        yield Finding(
            "evidence.incomplete",
            {"field": "weight_version", "samples": len(rows), "sample_id": rows[0].sample_id},
            {"reason": "a side does not say which weights it scored with; the values were paired as if equal"},
            "Record weight_spans with the sample and weight_version with every training pass.",
        )


def _defaulted(view: View) -> Iterable[Finding]:
    fields: Counter[tuple[str, str]] = Counter()
    first: dict[tuple[str, str], str] = {}
    rows = [("rollout", s.sample_id, s.metadata_source) for s in view.history.samples]
    rows += [(s.source, s.sample_id, s.metadata_source) for s in view.history.scores]
    for source, sample_id, metadata in rows:
        for name, how in metadata.items():
            if how == "defaulted":
                fields[source, name] += 1
                first.setdefault((source, name), sample_id)
    for (source, name), count in fields.items():
        where = {"field": name, "source": source, "sample_id": first[source, name]}
        yield Finding("metadata.defaulted", where, {"records": count})


def _routes(view: View) -> Iterable[Finding]:
    rows = [(s, s.routed_experts["coverage"]) for s in view.pairing.samples if "coverage" in s.routed_experts]
    short = [(sample, share) for sample, share in rows if share is not None and share < 1.0]
    if short:
        where = {"samples": len(short), "sample_id": short[0][0].sample_id}
        lowest = min(share for _, share in short)
        yield Finding("routes.incomplete", where, {"lowest_coverage": lowest, "samples_with_routes": len(rows)})
