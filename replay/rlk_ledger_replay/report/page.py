"""A report as one HTML file: no request leaves it, and nothing recorded can run in it.

Recorded strings are untrusted: every expression passes `clean` and then autoescape; data in script elements is
escaped JSON; the content security policy forbids every fetch and every script but the page's own, named by its hash.
"""

import base64
import hashlib
import json
from collections.abc import Callable
from functools import cache
from importlib import resources
from typing import Any

from jinja2 import DictLoader, Environment, StrictUndefined
from markupsafe import Markup, escape

from rlk_ledger_replay.report import figures, headline, live, splits, text
from rlk_ledger_replay.report.answers import Interval
from rlk_ledger_replay.report.figures import Measured
from rlk_ledger_replay.report.gather import Report, commands
from rlk_ledger_schemas.metrics import METRICS

ROWS = 400
"""Rows a table shows; where there are more, the newest."""
_FIRST = (
    ("abs_dlogp_mean", "mean |d|"),
    ("abs_dlogp_p99", "p99 |d|"),
    ("abs_dlogp_max", "largest |d|"),
    ("clip_fraction", "clip fraction"),
    ("kl_k3", "KL (k3)"),
    ("ess", "effective sample size"),
)
_ARM_METRICS = ("abs_dlogp_mean", "abs_dlogp_p99", "abs_dlogp_max", "clip_fraction", "mismatch_fraction")
_SHARES_OF = frozenset({"clip_fraction", "mismatch_fraction", "extreme_token_fraction", "ess"})


def render(report: Report) -> str:
    """The page of a report."""
    style, script = _asset("report.css"), _asset("report.js")
    page: str = _template("report.html.j2").render(
        report=report,
        style=style,
        script=script,
        policy=_policy(script),
        data=_data(report),
        headline=headline.headline(report),
        findings=headline.findings(report.lead, report.run_id),
        unmeasured=headline.unmeasured(report),
        first=[(label, metric(name, report.drift.values.get(name))) for name, label in _FIRST],
        metrics=[(name, METRICS[name], metric(name, value)) for name, value in report.drift.values.items()],
        arm_metrics=_ARM_METRICS,
        shown_levels=splits.LEVELS,
        shown=ROWS,
        points=figures.POINTS,
        links=report.lead.links(),
        engines=live.engines(report.lead),
        chains=live.chains(report.lead),
        commands=commands(report),
        **_figures(report),
    )
    return page.lstrip()


def metric(name: str, value: float | None) -> str:
    """A metric's value as the page shows it: shares in percent, counts whole, everything else in its unit."""
    if value is None:
        return "not defined"
    if name in _SHARES_OF:
        return text.percent(value)
    return f"{int(value):,}" if METRICS[name].unit == "tokens" else text.number(value)


def _figures(report: Report) -> dict[str, Any]:
    lead = report.lead
    floor = lead.interval("floor_drift")
    rules = lead.evidence.get("rules") or {}
    return {
        "floor": floor,
        "steps_figure": figures.steps(report.steps, floor),
        "distribution_figure": figures.distribution(report.histogram, floor),
        "shares_figure": figures.intervals(
            _measured(report, ("share_rollout", "Rollout", "rollout"), ("share_training", "Training", "training")),
            0.0,
            1.0,
            _rules(rules, share_both="both", share_one="one side"),
            "Share of the drift that each side holds",
        ),
        "multiples_figure": figures.intervals(
            _measured(
                report,
                ("multiple_drift", "Drift", ""),
                ("multiple_rollout", "Rollout", "rollout"),
                ("multiple_training", "Training", "training"),
            ),
            0.0,
            2.0,
            _rules(rules, floor_multiple="noise up to here"),
            "Distances as multiples of their own noise floor",
        ),
        "timeline_figure": figures.timeline(report.provenance.versions),
    }


def _measured(report: Report, *rows: tuple[str, str, str]) -> list[Measured]:
    found = ((name, label, report.lead.interval(name), style) for name, label, style in rows)
    return [
        Measured(label, interval, interval.share if name.startswith("share") else interval.times, style)
        for name, label, interval, style in found
        if interval is not None
    ]


def _rules(rules: dict[str, Any], **named: str) -> list[tuple[float, str]]:
    return [
        (float(rules[name]), f"{rules[name]} {label}")
        for name, label in named.items()
        if isinstance(rules.get(name), int | float)
    ]


def _data(report: Report) -> Any:
    """The page's numbers for machines: JSON in which no character can end the script element it stands in."""
    fields = report.lead.verdict or {}
    document = {
        "run_id": report.run_id,
        "ledger_id": report.ledger_id,
        "verdict": fields.get("verdict"),
        "decision": fields.get("decision"),
        "exit_code": fields.get("exit_code"),
        "evidence": report.lead.evidence,
        "findings": [
            {key: one.get(key) for key in ("finding_id", "severity", "where", "evidence", "next_step")}
            for one in report.lead.findings
        ],
        "drift": report.drift.to_dict(),
        "steps": [{"step": one.step, **one.drift.to_dict()} for one in report.steps[-ROWS:]],
    }
    return Markup(inert_json(document))


def inert_json(value: Any) -> str:
    """`value` as ASCII JSON without `<`, `>`, `&` and `'`, safe inside a script element."""
    found = json.dumps(value, ensure_ascii=True, sort_keys=True, default=str, separators=(",", ":"))
    for character in "<>&'":
        found = found.replace(character, f"\\u{ord(character):04x}")
    return found


def _policy(script: str) -> str:
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return (
        f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; "
        f"base-uri 'none'; form-action 'none'"
    )


def _asset(name: str) -> Any:
    return Markup(resources.files(__package__).joinpath(name).read_text("utf-8"))


@cache
def _template(name: str) -> Any:
    """The compiled template."""
    environment = Environment(
        loader=DictLoader({name: resources.files(__package__).joinpath(name).read_text("utf-8")}),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_finalize,
    )
    environment.filters.update(_FILTERS)
    return environment.get_template(name)


def _finalize(value: Any) -> Any:
    """What an expression becomes before it is escaped: hidden characters shown, absence said."""
    if value is None:
        return text.ABSENT
    return text.clean(value) if type(value) is str else value


def _interval(value: Any) -> str:
    if isinstance(value, Interval):
        return value.text
    return text.plain(value)


_FILTERS: dict[str, Callable[..., Any]] = {
    "num": text.number,
    "pct": text.percent,
    "short": text.short,
    "plain": text.plain,
    "cut": text.cut,
    "metric": lambda value, name: metric(name, value),
    "interval": _interval,
    "code": lambda value: _code(value),
}


def _code(value: str) -> Any:
    """A sentence in which every other part between backticks is code."""
    parts = text.clean(value).split("`")
    if len(parts) % 2 == 0:
        return escape("`".join(parts))
    return Markup("").join(
        Markup("<code>{}</code>").format(part) if index % 2 else escape(part) for index, part in enumerate(parts)
    )
