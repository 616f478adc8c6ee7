"""Verdicts on all factors of a run, and their record."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rlk_ledger.audit.finding import plain
from rlk_ledger_replay.explain.result import Explanation
from rlk_ledger_replay.explain.run import Material
from rlk_ledger_replay.factors.factor import Judged
from rlk_ledger_replay.factors.registry import factors
from rlk_ledger_replay.factors.verdict import judge
from rlk_ledger_replay.semantics import Side


def judge_factors(
    sides: Mapping[Side, Explanation], material: Material | None = None, *, keep: bool = False
) -> tuple[Judged, ...]:
    """The verdict on every factor, by id; recorded where `keep`, as gates of the first side's explanation."""
    found = tuple(judge(one, sides) for one in factors())
    if keep and material is not None:
        replay_id = next(iter(sides.values())).replay_id
        with material.ledger.writer(material.history.run_id, role="replay") as writer:
            for kind, fields in events(found, replay_id):
                writer.record(kind, **fields)
    return found


def events(found: tuple[Judged, ...], replay_id: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """One `gate.checked` a factor: passed where it is not the cause, failed where it is, unknown otherwise."""
    for one in found:
        status = "failed" if one.verdict.startswith(("caused", "coupled")) else "unknown"
        status = "passed" if one.verdict == "not_this_factor" else status
        yield (
            "gate.checked",
            {
                "replay_id": replay_id,
                "gate": f"factor.{one.factor.factor}",
                "status": status,
                "reason": f"{one.verdict}: {one.reason}",
                "evidence": plain(one.to_dict()),
            },
        )
