"""The page: it makes no request, recorded strings are inert in it, and every kind of run renders."""

import base64
import hashlib
import json
import math
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlk_ledger import drift
from rlk_ledger.audit.view import make_view
from rlk_ledger.history import load_history
from rlk_ledger.ledger import Ledger
from rlk_ledger.metrics import Drift, measure
from rlk_ledger_replay.report import figures, gather, render
from rlk_ledger_replay.report.answers import Interval
from rlk_ledger_replay.report.drift import StepDrift
from rlk_ledger_replay.report.page import inert_json, metric
from rlk_ledger_schemas.arrays import Array
from rlk_ledger_schemas.metrics import METRICS

VOID = {"meta", "link", "img", "br", "wbr", "hr", "input"}
SVG_EMPTY = {"path", "circle", "rect", "line"}
FETCHING = {"src", "href", "srcset", "data", "action", "formaction", "poster", "xlink:href", "ping", "background"}


class Page(HTMLParser):
    """What a browser sees of a page: elements with attributes, text by element, and whether every element closes."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text: list[str] = []
        self.scripts: list[tuple[dict[str, str | None], str]] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)
        if tag == "script":
            self.scripts.append((dict(attrs), ""))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag, f"</{tag}> closes another element"

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            self.scripts[-1] = (self.scripts[-1][0], self.scripts[-1][1] + data)
        elif not self.open or self.open[-1] != "style":
            self.text.append(data)

    @property
    def words(self) -> str:
        """All text outside scripts and styles, white space folded."""
        return " ".join(" ".join(self.text).split())

    @property
    def data(self) -> dict[str, Any]:
        """The machine-readable document."""
        return next(json.loads(body) for attributes, body in self.scripts if attributes.get("id") == "report-data")


def page_of(ledger: Ledger, run_id: str = "run-1") -> Page:
    """The parsed page of a run; it must close every element it opens."""
    page = Page(render(gather(ledger, run_id)))
    assert page.open == []
    return page


def assert_inert(page: Page) -> None:
    """No element may fetch, run a script of its own, or handle an event."""
    for tag, attributes in page.elements:
        assert tag not in {"iframe", "object", "embed", "base", "form", "img", "link", "foreignobject"}, tag
        for name, value in attributes.items():
            assert not name.startswith("on"), (tag, name)
            if name in FETCHING:
                assert value is not None
                assert value.startswith("#"), (tag, name, value)
    kinds = [attributes.get("type") for attributes, _ in page.scripts]
    assert kinds == ["application/json", None]


@pytest.fixture
def replayed_page(make: Any, healthy: Any, replayed: Any) -> Page:
    """The page of a healthy run with a replay."""
    return page_of(make([*healthy(), *replayed()]))


def test_a_page_makes_no_request(replayed_page: Page) -> None:
    assert_inert(replayed_page)


def test_no_style_fetches(make: Any, healthy: Any) -> None:
    html = render(gather(make(healthy(steps=1)), "run-1"))
    assert not re.search(r"url\(|@import|@font-face", html)


def test_the_policy_allows_exactly_the_script_of_the_page(replayed_page: Page) -> None:
    policy = next(a["content"] for t, a in replayed_page.elements if t == "meta" and "http-equiv" in a)
    body = replayed_page.scripts[-1][1]
    digest = base64.b64encode(hashlib.sha256(body.encode()).digest()).decode()
    assert policy is not None
    assert f"script-src 'sha256-{digest}';" in policy
    assert policy.startswith("default-src 'none';")


def test_the_verdict_leads_with_its_four_answers(replayed_page: Page) -> None:
    words = replayed_page.words
    for part in (
        "Pass The drift is 0.85 [0.76, 1.12] times its measured noise floor.",
        "How sure The drift stands at 0.85 [0.76, 1.12] times its noise floor (95 % interval",
        "resampled over 12 groups). All of it lies below the 1.5 that still counts as noise.",
        "rollout 49% [41%, 57%], training 51% [43%, 59%]",
        "1,140 tokens of 24 of 48 samples replayed",
        "1 of 2 gates passed; the record verifies",
        "What to do next Nothing to fix.",
    ):
        assert part in words
    assert words.index("Pass") < words.index("Findings") < words.index("Over steps") < words.index("Worst tokens")


def test_the_chain_arms_and_an_unmeasured_gate_are_shown(replayed_page: Page) -> None:
    words = replayed_page.words
    assert "prefill_over_decode" in words
    assert "training_reference_only" in words
    assert "evidence.samples: 2 samples were left out: no prompt recorded" in words


def test_the_numbers_are_those_of_the_metrics_module(make: Any, healthy: Any) -> None:
    events = healthy(steps=2)
    page = page_of(make(events))
    values = {(f["sample_id"], f["source"]): f["values"] for _, kind, f in events if kind == "logprobs"}
    samples = [f for _, kind, f in events if kind == "rollout.sample"]

    def expected(chosen: list[dict[str, Any]]) -> dict[str, Any]:
        return measure(
            np.concatenate([values[f["sample_id"], "rollout"] for f in chosen]),
            np.concatenate([values[f["sample_id"], "training"] for f in chosen]),
            active=np.concatenate([np.array(f["loss_mask"], bool) for f in chosen]),
            sample=np.repeat(np.arange(len(chosen)), [len(f["loss_mask"]) for f in chosen]),
        ).to_dict()

    whole = expected(samples)
    assert page.data["drift"] == whole
    assert page.data["steps"] == [{"step": s, **expected([f for f in samples if f["step"] == s])} for s in (0, 1)]
    for name, value in whole["metrics"].items():
        assert f"{name} {metric(name, value)}" in page.words
    assert set(whole["metrics"]) == set(METRICS)


HOSTILE = [
    "<script>alert(1)</script>",
    "</script><img src=x onerror=alert(1)>",
    "</style><svg onload=alert(1)>",
    "\"><a href='javascript:alert(1)'>",
    "' onmouseover='alert(1)",
    "{{ 7 * 7 }}{% raw %}",
    "`</code><b>",
    "<!--",
    "]]>",
]


@pytest.mark.parametrize("hostile", HOSTILE)
def test_recorded_strings_are_inert(make: Any, healthy: Any, replayed: Any, hostile: str) -> None:
    page = page_of(make(_poisoned(healthy(steps=1, groups=1), replayed(), hostile)))
    assert_inert(page)
    assert {tag for tag, _ in page.elements}.isdisjoint({"b", "img"})
    assert page.data["findings"][0]["evidence"]["worst"] == hostile
    assert " ".join(hostile.replace("`", "").split()) in page.words.replace("`", "")


def _poisoned(events: list[Any], replay: list[Any], hostile: str) -> list[Any]:
    """The events with `hostile` in every place that takes a free string."""
    out = []
    for writer, kind, fields in [*events, *replay]:
        new = dict(fields)
        if kind == "rollout.sample":
            new |= {"sample_id": hostile + new["sample_id"], "group_id": hostile, "engine": hostile}
        elif kind == "logprobs":
            new |= {"sample_id": hostile + new["sample_id"], "layout_id": hostile}
        elif kind == "writer.opened":
            new |= {"engine": {"name": hostile, "version": hostile}, "host": hostile}
            new |= {"environment": {"python": hostile, hostile: {hostile: hostile}, "pins": [{"package": hostile}]}}
        elif kind == "weights.loaded":
            new["engine"] = hostile
        elif kind in ("gate.checked", "verdict.reached"):
            new["reason"] = hostile
        elif kind == "finding.raised":
            new |= {"next_step": hostile, "where": {hostile: hostile}, "evidence": {"worst": hostile}}
        out.append((writer, kind, new))
    knob = {"path": hostile, "requested": hostile, "actual": {hostile: [hostile]}, "status": "fallback"}
    decided = {"operator": hostile, "side": hostile, "requested_backend": hostile, "actual_backend": hostile}
    return [
        *out,
        ("a", "knob.applied", {**knob, "evidence": hostile}),
        ("a", "operator.decided", {**decided, "fallback": True, "reason": hostile}),
        ("a", "gap", {"kind": "rejected", "first": 1, "last": 2, "reason": hostile}),
    ]


def test_control_and_direction_characters_are_shown_not_obeyed(make: Any, healthy: Any, replayed: Any) -> None:
    hidden = "a\u202eb\x00c\x1bd\u200be\u2028f\ufeff"
    html = render(gather(make(_poisoned(healthy(steps=1, groups=1), replayed(), hidden)), "run-1"))
    for character in "\u202e\x00\x1b\u200b\u2028\ufeff":
        assert character not in html
    assert "a\\u{202E}b\\u{0000}c\\u{001B}d\\u{200B}e\\u{2028}f\\u{FEFF}" in Page(html).words


def test_json_in_a_script_cannot_end_it() -> None:
    value = {"</script>": ["<!--", "&amp;", "'", "\u2028", 1.5]}
    text = inert_json(value)
    assert not re.search(r"[<>&']", text)
    assert text.isascii()
    assert json.loads(text) == value


def test_a_run_without_a_replay_says_what_was_not_measured(make: Any, healthy: Any) -> None:
    page = page_of(make(healthy()))
    assert "Judged from the record alone" in page.words
    assert "noise floor, shares and arms are not measured" in page.words
    assert "rlk-ledger replay --run-id run-1" in page.words
    assert "The four arms" not in page.words
    assert_inert(page)


def test_a_run_without_a_training_side_is_no_pass(make: Any, sides: Any, sample: Any) -> None:
    page = page_of(make([*sides(), *sample("s", 0, [1, 2], [1, 1], [-1.0, -2.0], None)]))
    assert page.data["verdict"] != "pass"
    assert "Never scored by training" in page.words
    assert "there is nothing to measure here, which is not the same as no drift" in page.words
    assert_inert(page)


def test_zero_active_tokens_render_and_are_no_pass(make: Any, sides: Any, sample: Any) -> None:
    page = page_of(make([*sides(), *sample("s", 0, [1, 2], [0, 0], [-1.0, -2.0], [-1.0, -2.0])]))
    assert page.data["verdict"] != "pass"
    assert page.data["drift"]["status"] == "zero_active_tokens"
    assert "No sample has a token to compare." in page.words


def test_one_token_renders(make: Any, sides: Any, sample: Any) -> None:
    page = page_of(make([*sides(), *sample("s", 3, [65], [1], [-1.0], [-1.5])]))
    cells = [a for t, a in page.elements if t == "i" and "title" in a]
    assert [cell["class"] for cell in cells] == ["l4"]
    assert "position 0, token id 65\nrollout -1.00, training -1.50\nd = -0.500, outside the clip band" in str(
        cells[0]["title"]
    )


def test_an_empty_run_renders(make: Any, sides: Any) -> None:
    page = page_of(make(sides()[:1]))
    assert page.data["verdict"] != "pass"
    assert "No engine was recorded." in page.words


def test_values_that_are_no_numbers_are_named_not_drawn(make: Any, sides: Any, sample: Any) -> None:
    rollout = [-1.0, math.nan, -math.inf, -1.2]
    page = page_of(make([*sides(), *sample("s", 0, [65, 66, 67, 68], [1, 1, 1, 1], rollout, [-1.0, -1.0, -1.0, -1.1])]))
    titles = [str(a["title"]) for t, a in page.elements if t == "i" and "title" in a]
    assert "rollout value: nan" in titles[1]
    assert "rollout value: neg_inf" in titles[2]
    assert "2 compared tokens, 2 without a measurement" in page.words
    assert page.data["drift"]["tokens"] == 2
    numbers = {value for t, a in page.elements if t in SVG_EMPTY for value in a.values() if value}
    assert not any("nan" in number or "inf" in number for number in numbers)


def test_masked_tokens_are_hatched_and_bytes_are_readable(make: Any, sides: Any, sample: Any) -> None:
    tokens, mask = [0x61, 0x20, 0x0A, 0xC3, 257], [1, 0, 1, 1, 1]
    page = page_of(make([*sides(), *sample("s", 0, tokens, mask, [-1.0] * 5, [-1.01] * 5)]))
    html = render(gather(make([*sides(), *sample("s", 0, tokens, mask, [-1.0] * 5, [-1.01] * 5)]), "run-1"))
    assert re.findall(r"<i [^>]*>([^<]*)</i>", html) == ["a", "\u2423", "\u23ce", "C3", "257"]
    masked = [a for t, a in page.elements if t == "i" and "masked" in str(a.get("class"))]
    assert [str(a["title"]).splitlines()[0] for a in masked] == ["position 1, token id 32"]


def test_figures_hold_finite_coordinates_for_unbounded_intervals(make: Any, healthy: Any, replayed: Any) -> None:
    events = replayed()
    for _, kind, fields in events:
        if kind == "verdict.reached":
            fields["evidence"]["multiple_drift"] = {"value": 0.9, "low": None, "high": None}
            fields["evidence"]["floor_drift"] = None
    page = page_of(make([*healthy(steps=1), *events]))
    assert "0.90 [not bounded, not bounded]" in page.words
    for tag, attributes in page.elements:
        if tag in SVG_EMPTY:
            assert not re.search(r"nan|inf", " ".join(str(v) for v in attributes.values())), attributes


def test_both_widths_of_a_figure_carry_a_description(replayed_page: Page) -> None:
    drawn = [a for t, a in replayed_page.elements if t == "svg" and "aria-hidden" not in a]
    assert {a["class"] for a in drawn} == {"wide", "narrow"}
    assert all(a["role"] == "img" for a in drawn)
    assert len([a for a in drawn if a["class"] == "wide"]) == 5


def test_dimensions_that_separate_the_same_tokens_are_one(make: Any, sides: Any, sample: Any) -> None:
    events = sides()
    for index in range(8):
        late = index % 2 == 0
        drifted = [-1.0 + (0.4 if late else 0.01)] * 6
        events += sample(
            f"s{index}", 0, [65] * 6, [1] * 6, [-1.0] * 6, drifted, model="a" if late else "b", turn=int(late)
        )
    ledger = make(events)
    found = {split.dimension: split for split in gather(ledger, "run-1").splits}
    first = next(iter(found.values()))
    assert {first.dimension, *first.aliases} >= {"model", "turn"}
    assert [(level.tokens, round(level.mean, 3)) for level in first.levels] == [(24, 0.4), (24, 0.01)]
    assert first.ratio == pytest.approx(40.0, rel=1e-3)
    view = make_view(load_history(ledger, "run-1"))
    rows = sorted(drift.by(view, ["model"]), key=lambda row: -row["metrics"]["abs_dlogp_mean"])
    assert [row["metrics"]["dlogp_rms"] for row in rows] == [level.rms for level in first.levels]


def test_a_share_of_nothing_has_no_sign() -> None:
    assert Interval(-0.001, -0.012, 0.004).share == "0% [-1%, 0%]"


def test_thousands_of_steps_stay_a_small_page(make: Any, sides: Any, sample: Any) -> None:
    events = sides()
    for step in range(1000):
        events += sample(f"s{step}", step, [65, 66], [1, 1], [-1.0, -2.0], [-1.0 + 0.5 * (step == 777), -2.01])
    html = render(gather(make(events), "run-1"))
    assert len(html) < 800_000
    page = Page(html)
    assert page.data["steps"][-1]["step"] == 999
    assert "The last 400 of 1,000 are shown" in page.words


def test_the_highest_of_many_steps_is_drawn() -> None:
    calm = Drift("measured", 10, 10, 1, values={"abs_dlogp_mean": 0.1, "dlogp_rms": 0.1, "abs_dlogp_p99": 0.1})
    wild = replace(calm, values={**calm.values, "abs_dlogp_mean": 0.9})
    drawn = figures.steps([StepDrift(step, wild if step == 778 else calm) for step in range(1000)], None)
    line = re.search(r'<path d="([^"]*)" class="line mean"', str(drawn))
    assert line is not None
    heights = sorted(float(point.split()[1]) for point in line[1].removeprefix("M").split("L"))
    assert len(heights) == 334
    assert heights[0] < 50 < 180 < heights[1]


def test_what_happened_names_the_cause_the_record_shows(make: Any, healthy: Any, replayed: Any) -> None:
    events = replayed("fail")
    stale = {"finding_id": "weights.not_loaded", "severity": "error", "evidence": {}, "next_step": "Check the sync."}
    events.insert(-1, ("c", "finding.raised", {**stale, "where": {"engine": "rollout-0", "version": "v3"}}))
    words = page_of(make([*healthy(steps=1), *events])).words
    cause = "An engine kept its old weights under a new version (engine rollout-0, version v3)."
    assert f"Fail {cause} The drift is 0.85 [0.76, 1.12] times its measured noise floor." in words
    assert "What to do next Check the sync." in words


def test_a_residual_is_not_sold_as_the_drift(make: Any, healthy: Any, replayed: Any) -> None:
    events = replayed("not_comparable")
    events[-1][2]["evidence"]["residual"] = {"decision": "within_floor", "reason": "Small."}
    words = page_of(make([*healthy(steps=1), *events])).words
    assert "Once each side is scored as it declares itself, 0.85 [0.76, 1.12] noise floors of drift remain" in words
    assert "The drift stands at" not in words
    assert "Shares and multiples below are about what remains" in words


def test_a_damaged_record_never_shows_a_pass(make: Any, healthy: Any, replayed: Any) -> None:
    ledger = make([*healthy(steps=1), *replayed()])
    (Path(ledger.url) / "runs" / "run-1" / "receipt" / "junk.json").write_text("{}")
    page = page_of(ledger)
    banner = next(a for t, a in page.elements if t == "section" and "aria-label" in a)
    assert banner["class"] == "verdict fail"
    assert "Does not verify The ledger does not hold what was recorded" in page.words
    assert "the record does NOT verify" in page.words
    assert "What to do next Run rlk-ledger verify run-1 first" in page.words


def test_redacted_tokens_are_short_and_no_text(make: Any, sides: Any, sample: Any) -> None:
    hashes = Array("uint64", np.array([2**63 + 0xBEEF, 2**62 + 0x41], "<u8").tobytes())
    page = page_of(make([*sides(), *sample("s", 0, hashes, [1, 1], [-1.0, -1.0], [-1.0, -1.01])]))
    cells = [a for t, a in page.elements if t == "i" and "title" in a]
    assert len(cells) == 2
    assert "beef 0041" in page.words.replace("beef0041", "beef 0041")


def test_a_sample_without_any_measurement_comes_first(make: Any, sides: Any, sample: Any) -> None:
    events = [*sides(), *sample("loud", 0, [65] * 4, [1] * 4, [-1.0] * 4, [-3.0] * 4)]
    events += sample("lost", 0, [66] * 4, [1] * 4, [math.nan] * 4, [-1.0] * 4)
    report = gather(make(events), "run-1")
    assert [(strip.sample_id, strip.rms, strip.unmeasured) for strip in report.strips] == [
        ("lost", None, 4),
        ("loud", 2.0, 0),
    ]
    assert "0 compared tokens, 4 without a measurement" in Page(render(report)).words


def test_what_was_kept_out_of_drift_is_listed_as_not_measured(make: Any, sides: Any, sample: Any) -> None:
    events = [*sides(), *sample("seen", 0, [65, 66], [1, 1], [-1.0] * 2, [-1.01] * 2)]
    events += sample("unseen", 0, [65, 66, 67], [1, 1, 1], [-1.0] * 3, None)
    words = page_of(make(events)).words
    assert "Tokens compared: 2, 40.0% of the active ones." in words
    assert "Never scored by training: 3, active tokens without a value: not observed is not clean." in words
