"""Weights as the workers hold them, added up over tensor ranks and recorded under the version they are said to be."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from rlk_ledger_schemas.fingerprints import MASK64, sum64x2_digest
from rlk_ledger_sdk.api import record
from rlk_ledger_sdk.knobs import UNOBSERVABLE, read_back


class Held(NamedTuple):
    """What all workers together hold. `differing` names tensors whose copies on several ranks are not equal."""

    digest: str
    tensors: list[dict[str, Any]]
    differing: list[str]
    unread: dict[str, str]
    adapters: dict[str, str]
    """Digest by LoRA id."""


def added_up(answers: Sequence[Mapping[str, Any]]) -> Held:
    """One digest of the answers of every worker (`worker.weights_held`) of the first data-parallel replica.

    What two pipeline stages hold, as the embedding of a tied head, counts on the first of them.
    """
    answers = [answer for answer in answers if answer["replica"] == answers[0]["replica"]]
    totals: dict[str, list[int]] = {}
    shapes: dict[str, list[Any]] = {}
    unread: dict[str, str] = {}
    first = _first_stage(answers)
    for answer in answers:
        unread.update(answer["unread"])
        shapes.update(answer["shapes"])
        for name, (low, high) in answer["sums"].items():
            if answer["stage"] != first[name]:
                continue
            total = totals.setdefault(name, [0, 0])
            total[0], total[1] = (total[0] + low) & MASK64, (total[1] + high) & MASK64
    tensors = [
        {
            "name": name,
            "digest": sum64x2_digest([(total[0], total[1])]),
            "dtype": shapes[name][0],
            "shape": shapes[name][1:],
        }
        for name, total in totals.items()
    ]
    digest = sum64x2_digest((total[0], total[1]) for total in totals.values())
    adapters = dict(answers[0].get("adapters", {})) if answers else {}
    return Held(digest, tensors, _differing(answers), unread, adapters)


def record_load(
    version: str,
    engine: str,
    held: Held,
    *,
    before: str | None,
    caches_flushed: bool | None,
    path: str | None,
    adapters: list[dict[str, str]] | None,
) -> None:
    """Records one `weights.loaded` of what is held; the list of tensors goes along when the digest moved."""
    if held.unread:
        reasons = "; ".join(f"{name}: {why}" for name, why in sorted(held.unread.items())[:3])
        unobservable(f"{len(held.unread)} tensors cannot be read back ({reasons})")
        return
    record(
        "weights.loaded",
        weight_version=version,
        digest=held.digest,
        tensor_count=len(held.tensors),
        engine=engine,
        what="holds",
        tensors=held.tensors if held.digest != before else None,
        caches_flushed=caches_flushed,
        path=path,
        adapters=adapters,
    )
    if held.differing:
        read_back(
            "weights.replicas",
            requested="equal on every rank",
            actual="differ: " + ", ".join(held.differing[:20]),
            evidence="sums of the same tensor computed in each worker",
            lifecycle="engine",
        )


def unobservable(reason: str) -> None:
    """Records that the digest of what the workers hold cannot be had, and why."""
    read_back("weights.digest", requested="holds", actual=UNOBSERVABLE, evidence=reason, lifecycle="engine")


def _first_stage(answers: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """The first pipeline stage that holds each tensor."""
    first: dict[str, int] = {}
    for answer in answers:
        for name in answer["sums"]:
            first[name] = min(answer["stage"], first.get(name, answer["stage"]))
    return first


def _differing(answers: Sequence[Mapping[str, Any]]) -> list[str]:
    """Names whose uncounted copies do not match.

    Compared where one rank of a stage counts the whole that others copy, and between stages that hold the same.
    """
    totals: dict[tuple[str, int], list[list[int]]] = {}
    for answer in answers:
        for name, sums in answer["sums"].items():
            totals.setdefault((name, answer["stage"]), []).append(sums)
    found = {
        name
        for answer in answers
        for name, sums in answer["copies"].items()
        if len(held := totals.get((name, answer["stage"]), [])) == 1 and held[0] != sums
    }
    first = _first_stage(answers)
    for (name, _), held in totals.items():
        if _sum(held) != _sum(totals[name, first[name]]):
            found.add(name)
    return sorted(found)


def _sum(pairs: Sequence[Sequence[int]]) -> tuple[int, int]:
    return sum(low for low, _ in pairs) & MASK64, sum(high for _, high in pairs) & MASK64
