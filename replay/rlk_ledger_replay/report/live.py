"""What live engines added to an answer, read from its verdict's evidence: engines, chains and their parts of the drift.

Evidence is what some writer recorded; whatever does not look as it should is left out, never guessed.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from rlk_ledger_replay.report import figures
from rlk_ledger_replay.report.answers import Answer, Interval
from rlk_ledger_replay.report.text import interval_text, is_interval

Fields = dict[str, Any]


@dataclass(frozen=True)
class Engine:
    """One live engine as words: what ran, whether a guard failed, and its figures where they were measured."""

    name: str
    side: str
    ran: str
    layout: str
    applied: bool
    equal: float | None
    reproduction: str
    times: str
    floor: str
    problems: tuple[str, ...]


@dataclass(frozen=True)
class Chain:
    """One chain of links as (link, mean abs, RMS, part), and the figure of the parts."""

    name: str
    links: tuple[tuple[str, str, str, str], ...]
    figure: Markup | None


def engines(answer: Answer) -> list[Engine]:
    """The live engines of an answer; empty where none was asked for."""
    live = _fields(answer.evidence.get("live"))
    attempts = _listed(live.get("attempts"))
    return [_engine(str(name), one, attempts) for name, one in _named(live.get("scorers"))]


def chains(answer: Answer) -> list[Chain]:
    """The chain decompositions by live engines."""
    live = _fields(answer.evidence.get("live"))
    return [_chain(str(name), dict(_named(links))) for name, links in _named(live.get("chain"))]


def _engine(name: str, one: Fields, attempts: list[Fields]) -> Engine:
    told = next(iter(_listed(one.get("statements"))), {})
    ran = " ".join(str(told[key]) for key in ("engine", "version", "dtype", "device") if told.get(key))
    again = _fields(one.get("reproduction"))
    equal = again.get("equal")
    reasons = {
        f"{', '.join(sorted(str(a.get('role')) for a in attempts if a.get('reason') == reason))}: {reason}"
        for reason in (a.get("reason") for a in attempts if a.get("scorer") == name)
        if reason
    }
    return Engine(
        name=name,
        side=str(one.get("side") or ""),
        ran=ran or "nothing",
        layout=str(one.get("layout") or ""),
        applied=one.get("applied") is True,
        equal=float(equal) if isinstance(equal, int | float) else None,
        reproduction=_text(again.get("rms")),
        times=_text(one.get("reproduction_times_floor")),
        floor=_text(one.get("floor_native")),
        problems=tuple(sorted(reasons)),
    )


def _chain(name: str, links: dict[str, Fields]) -> Chain:
    parts = []
    for link, one in links.items():
        interval = _interval(one.get("part"))
        if interval is not None and link != "training_over_rollout":
            parts.append(figures.Measured(_words(link), interval, interval.share))
    rows = tuple(
        (_words(link), _text(one.get("mean_abs")), _text(one.get("rms")), _part(one.get("part")))
        for link, one in links.items()
    )
    return Chain(name, rows, figures.intervals(parts, 0.0, 1.0, [], f"Parts of the drift along the chain by {name}"))


def _words(link: str) -> str:
    return link.replace("_over_", " / ")


def _named(value: Any) -> Iterator[tuple[str, Fields]]:
    for name, one in _fields(value).items():
        if isinstance(one, dict):
            yield name, one


def _listed(value: Any) -> list[Fields]:
    return [one for one in value if isinstance(one, dict)] if isinstance(value, list) else []


def _fields(value: Any) -> Fields:
    return value if isinstance(value, dict) else {}


def _interval(value: Any) -> Interval | None:
    if not isinstance(value, dict) or not is_interval(value) or not isinstance(value["value"], int | float):
        return None
    return Interval(float(value["value"]), value["low"], value["high"])


def _text(value: Any) -> str:
    return interval_text(value) if isinstance(value, dict) and is_interval(value) else ""


def _part(value: Any) -> str:
    interval = _interval(value)
    return "" if interval is None else interval.share
