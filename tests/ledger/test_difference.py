"""`diff`: what differs between two runs, in causal order; what one run did not record is unknown."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from rlk_ledger.build import build, event
from rlk_ledger.cli import main
from rlk_ledger.difference import ASPECTS

SAMPLES = 3
TOKENS = 5
Told = list[tuple[str, str, dict[str, Any]]]


def told() -> Told:
    """A small run: two sides, all that `diff` compares."""
    out: Told = []
    for side in ("rollout", "training"):
        out.append((side, "writer.opened", opened(side)))
        body = {"temperature": 1.0, "head_dtype": "float32"}
        out.append((side, "contract.declared", {"kind": "logprob", "version": "1", "body": body}))
        out.append((side, "knob.applied", {"path": "a.b", "requested": 1, "status": "applied", "actual": 1}))
    out.append(("training", "weights.published", {"weight_version": "v0", "digest": "sha256:aa", "tensor_count": 2}))
    decided = {"operator": "attention", "side": "training", "requested_backend": "x", "actual_backend": "x"}
    out.append(("training", "operator.decided", {**decided, "fallback": False}))
    layout = {"layout_id": "l0", "sample_order": ("s0", "s1"), "sequence_lengths": [4, 5], "packing": True}
    out.append(("training", "batch.layout", layout))
    for i in range(SAMPLES):
        body = {"sample_id": f"s{i}", "prompt_token_ids": [1, 2], "response_token_ids": list(range(TOKENS))}
        body |= {"loss_mask": [1] * TOKENS, "weight_spans": [{"version": "v0", "start": 0, "end": TOKENS}]}
        out.append(("rollout", "rollout.sample", body))
        for side, shift in (("rollout", 0.0), ("training", 0.01)):
            values = [-0.1 * (k + 1) - shift for k in range(TOKENS)]
            scored = {
                "sample_id": f"s{i}",
                "source": side,
                "values": values,
                "contract_id": "c",
                "weight_version": "v0",
            }
            out.append((side, "logprobs", scored))
    return out


def opened(side: str) -> dict[str, Any]:
    environment = {"python": "3.11", "torch": "2.13"}
    return {"role": side, "rank": 0, "world_size": 1, "engine": {"name": side}, "environment": environment}


def write(url: str, run: str, events: Iterable[tuple[str, str, dict[str, Any]]]) -> None:
    numbers: dict[str, int] = {}
    records = []
    for writer, kind, fields in events:
        seq = numbers[writer] = numbers.get(writer, -1) + 1
        records.append(event(run, f"{run}-{writer}", seq, kind, **fields))
    build(url, run, records)


def diff(tmp_path: Path, capsys: Any, left: Told, right: Told, *options: str) -> tuple[int, Any]:
    url = str(tmp_path / "ledger")
    write(url, "a", left)
    write(url, "b", right)
    code = main(["diff", "a", "b", "--ledger", url, *options])
    text = capsys.readouterr().out
    return code, json.loads(text) if "--json" in options else text


def changed(kind: str, side: str, **fields: Any) -> Told:
    """The run with fields of one kind of event changed on one side (nested dicts are merged, None drops)."""
    out = copy.deepcopy(told())
    for writer, name, body in out:
        if name == kind and writer == side:
            for key, value in fields.items():
                merged = {**body[key], **value} if isinstance(value, dict) else value
                body.pop(key, None)
                if merged is not None:
                    body[key] = merged
    return out


def test_two_runs_with_the_same_record_are_equal_whatever_their_writers_are_called(tmp_path: Path, capsys: Any) -> None:
    code, found = diff(tmp_path, capsys, told(), told(), "--json")
    assert (code, found["first"]) == (0, None)
    assert {a["aspect"]: a["status"] for a in found["aspects"]} == dict.fromkeys([*ASPECTS, "drift"], "equal")


CHANGES = {
    "provenance": changed("writer.opened", "training", engine={"version": "9"}),
    "environment": changed("writer.opened", "training", environment={"torch": "2.14"}),
    "contracts": changed("contract.declared", "training", body={"temperature": 0.7}),
    "weights": changed("weights.published", "training", digest="sha256:bb"),
    "knobs": changed("knob.applied", "rollout", actual=2),
    "decisions": changed("operator.decided", "training", actual_backend="y", fallback=True),
    "samples": changed("rollout.sample", "rollout", loss_mask=[1, 1, 0, 1, 1]),
    "versions": changed("rollout.sample", "rollout", weight_spans=[{"version": "v0", "start": 0, "end": TOKENS - 1}]),
    "layouts": changed("batch.layout", "training", packing=False),
    "values": changed("logprobs", "training", values=[-0.5] * TOKENS),
}


@pytest.mark.parametrize("aspect", CHANGES)
def test_each_aspect_is_the_first_difference_when_it_alone_was_changed(
    tmp_path: Path, capsys: Any, aspect: str
) -> None:
    code, found = diff(tmp_path, capsys, told(), CHANGES[aspect], "--json")
    states = {a["aspect"]: a["status"] for a in found["aspects"]}
    if aspect == "provenance":  # a version that one side did not say is unknown, not different
        assert (code, states["provenance"], found["first"]) == (3, "unknown", None)
        return
    assert (code, found["first"]["aspect"], states[aspect]) == (1, aspect, "differs")
    causes = [*ASPECTS, "drift"][: [*ASPECTS, "drift"].index(aspect)]
    assert all(states[name] == "equal" for name in causes)


def test_causes_stand_before_what_they_cause(tmp_path: Path, capsys: Any) -> None:
    both = changed("logprobs", "training", values=[-0.5] * TOKENS)
    for _, kind, body in both:
        if kind == "contract.declared":
            body["body"] = {**body["body"], "temperature": 0.5}
    code, found = diff(tmp_path, capsys, told(), both, "--json")
    assert code == 1
    assert (found["first"]["name"], found["first"]["left"], found["first"]["right"]) == (
        "rollout.logprob.temperature",
        1.0,
        0.5,
    )
    states = {a["aspect"]: a["status"] for a in found["aspects"]}
    assert (states["values"], states["drift"]) == ("differs", "differs")


def test_what_one_run_did_not_record_is_unknown_and_never_equal(tmp_path: Path, capsys: Any) -> None:
    for kind in ("weights.published", "batch.layout", "operator.decided"):
        less = [one for one in told() if one[1] != kind]
        code, found = diff(tmp_path / kind, capsys, told(), less, "--json")
        assert (code, found["first"]) == (3, None)
        missing = [i for a in found["aspects"] for i in a["items"]]
        assert {i["status"] for i in missing} == {"unknown"}
        assert all(i["right"] is None and i["left"] is not None for i in missing)
        neither, same = diff(tmp_path / f"{kind}-neither", capsys, less, less, "--json")
        assert neither == 3
        assert sorted(a["status"] for a in same["aspects"])[-1] == "unknown"


def test_the_first_difference_is_kept_when_very_many_values_are_unknown(tmp_path: Path, capsys: Any) -> None:
    many: Told = [("rollout", "knob.applied", {"path": f"k{i}", "requested": 1, "status": "applied", "actual": 1})
                  for i in range(300)]  # fmt: skip
    last = [
        ("rollout", "knob.applied", {"path": "z", "requested": 1, "status": "applied", "actual": n}) for n in (1, 2)
    ]
    code, found = diff(tmp_path, capsys, [*told(), *many, last[0]], [*told(), last[1]], "--json")
    assert (code, found["first"]["name"]) == (1, "rollout.z")
    knobs = next(a for a in found["aspects"] if a["aspect"] == "knobs")
    assert (knobs["differs"], knobs["unknown"], len(knobs["items"])) == (1, 300, 200)


def test_the_text_begins_with_the_first_difference_and_has_no_colour_in_a_pipe(tmp_path: Path, capsys: Any) -> None:
    code, text = diff(tmp_path, capsys, told(), CHANGES["contracts"])
    assert code == 1
    assert text.splitlines()[:3] == ["first difference: contracts, training.logprob.temperature", "a: 1", "b: 0.7"]
    assert "\x1b" not in text


def test_a_missing_run_is_one_sentence(tmp_path: Path, capsys: Any) -> None:
    write(str(tmp_path / "ledger"), "a", told())
    assert main(["diff", "a", "zzz", "--ledger", str(tmp_path / "ledger")]) == 2
    assert "no run 'zzz'" in capsys.readouterr().err


def test_runs_of_two_ledgers_compare(tmp_path: Path, capsys: Any) -> None:
    write(str(tmp_path / "one"), "a", told())
    write(str(tmp_path / "two"), "a", CHANGES["weights"])
    code = main(
        ["diff", "a", "a", "--ledger", str(tmp_path / "one"), "--other-ledger", str(tmp_path / "two"), "--json"]
    )
    assert (code, json.loads(capsys.readouterr().out)["first"]["name"]) == (1, "v0.published.digest")
