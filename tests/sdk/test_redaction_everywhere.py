"""Under redaction no field of any event type lets text or a digest of tokens out, but for those listed by name."""

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlk_ledger_schemas.errors import EventError
from rlk_ledger_schemas.events import COMMON, REGISTRY, check_fields
from rlk_ledger_sdk import api, redaction
from rlk_ledger_sdk.testing import read_spool

KEY = "correct horse battery"
SECRET = "Ada Lovelace wrote: «hello»"
ROOT = Path(__file__).parents[2]


LATER: list[tuple[str, dict[str, Any]]] = [
    (
        "boundary.captured",
        {
            "boundary": "layers.0",
            "order": 0,
            "digest": "sum64x2:00",
            "stage": "embed",
            "inputs": ["embed"],
            "dtype": "float32",
            "contract_ids": ["c"],
            "route": "eager",
            "pass_id": "p",
            "layout_id": "l",
        },
    ),
    (
        "segment.timed",
        {"operator": "mlp", "part_of": "step", "elapsed_ns": 1, "stream": "s", "bucket_plan": {"order": ["a"]}},
    ),
    (
        "splitkv.planned",
        {
            "plan_id": "sha256:00",
            "kv_block": 64,
            "tp": 1,
            "cp": 1,
            "owners": 1,
            "num_splits": 1,
            "merge_order": "global_block_index",
            "blocks": [1],
            "entries": [0, 0, 0, 0, 0, 1],
            "side": "rollout",
            "contract_id": "c",
            "layout_id": "l",
            "pass_id": "p",
        },
    ),
    (
        "drift.diagnosed",
        {
            "status": "measured",
            "tokens": 1,
            "active": 1,
            "excluded": {"rollout.nan": 1},
            "metrics": {"kl_k3": 0.5},
            "thresholds": {"kl_k3": 0.5},
            "exceeded": ["kl_k3"],
            "worst": {"sample_id": "s", "dlogp": 0.5},
            "weight_version": "v",
            "pass_id": "p",
        },
    ),
    (
        "batch.admitted",
        {
            "outcome": "quarantined",
            "samples": 2,
            "admitted": 1,
            "quarantined": 1,
            "not_applicable": 0,
            "reasons": {"spans_incomplete": 1},
            "decisions": [
                {"status": "quarantined", "reasons": [{"code": "c", "field": "f"}], "sample_ids": ["s"]},
            ],
            "tolerance_version": "1",
        },
    ),
]
"""Types that are younger than the golden ledger."""


def golden_events() -> list[tuple[str, dict[str, Any]]]:
    """An event of every type with every field it can have, as the golden ledger holds them."""
    spec = importlib.util.spec_from_file_location("make_golden_for_redaction", ROOT / "tools/golden/make_golden.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return [*module.rollout_events(), *module.training_events(), *LATER]


def own_words(type_name: str) -> frozenset[str]:
    return redaction._OWN_WORDS.get(type_name, frozenset())


def planted(value: Any) -> Iterator[Any]:
    """Copies of `value` in which one text, at any depth, is the secret; keys of maps count."""
    if isinstance(value, str):
        yield SECRET
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from ({**value, key: new} for new in planted(inner))
        if value:
            yield {**value, SECRET: next(iter(value.values()))}
    elif isinstance(value, list | tuple):
        for at, inner in enumerate(value):
            yield from ([*value[:at], new, *value[at + 1 :]] for new in planted(inner))


def accepted(type_name: str, fields: dict[str, Any]) -> bool:
    try:
        check_fields(type_name, dict(fields))
    except EventError:
        return False
    return True


def variants() -> list[tuple[str, str, dict[str, Any]]]:
    """(type, field, event) of every way to put the secret into an event that the schemas let through."""
    out = []
    free = {"labels": {"note": SECRET}, "rollout_id": SECRET}
    for type_name, fields in golden_events():
        for name, value in {**fields, **free}.items():
            if name in COMMON or name in own_words(type_name):
                continue
            for new in [value] if name in free else planted(value):
                event = {**fields, name: new}
                if accepted(type_name, event):
                    out.append((type_name, name, event))
        for name in COMMON:
            if name in free and accepted(type_name, {**fields, name: free[name]}):
                out.append((type_name, name, {**fields, name: free[name]}))
    return [(t, n, e) for t, n, e in out if t not in redaction._ABOUT]


def test_the_secret_can_be_put_into_a_hundred_places() -> None:
    found = variants()
    assert len(found) > 120
    assert {t for t, _, _ in found} >= set(REGISTRY) - redaction._ABOUT - {"writer.closed", "writer.lost", "gap"}


@pytest.mark.parametrize("mode", ["hash", "drop"])
def test_no_text_leaves_through_any_field_of_any_event(opened, monkeypatch, mode) -> None:
    monkeypatch.setenv("RLK_REDACTION_KEY", KEY)
    recorder = opened(redaction=mode, on_error="warn")
    for type_name, _, fields in variants():
        api.record(type_name, **fields)
    found = read_spool(recorder.directory).events
    assert len(found) > 100
    data = b"".join(path.read_bytes() for path in recorder.directory.glob("*.spool"))
    for needle in (SECRET, "Ada", "Lovelace", "hello"):
        assert needle.encode() not in data
    kept = [e for e in found if e.type == "rollout.sample" and (e.fields.get("sample_id") or "").startswith("text:")]
    assert bool(kept) == (mode == "hash"), "a name that is text becomes a keyed name, or the event is refused"


def test_the_secret_does_leave_without_redaction(opened) -> None:
    recorder = opened(redaction="none", on_error="warn")
    for type_name, _, fields in variants():
        api.record(type_name, **fields)
    data = b"".join(path.read_bytes() for path in recorder.directory.glob("*.spool"))
    assert data.count(SECRET.encode()) > 120


@pytest.mark.parametrize("mode", ["hash", "drop"])
def test_what_the_job_says_of_itself_at_init_is_cleaned_too(opened, monkeypatch, mode) -> None:
    monkeypatch.setenv("RLK_REDACTION_KEY", KEY)
    digest = "sha256:" + "5" * 64
    recorder = opened(
        redaction=mode,
        job={"prompt": SECRET, "name": "job-7"},
        lineage={"notes": [SECRET]},
        environment={"files": {"a.pt": digest, SECRET: 1}},
    )
    run, writer = read_spool(recorder.directory).events[:2]
    data = b"".join(path.read_bytes() for path in recorder.directory.glob("*.spool"))
    assert b"Lovelace" not in data
    assert digest.encode() not in data, "the digest of a file of tokens is a digest of tokens"
    assert run.fields["job"]["name"] == "job-7"
    assert writer.fields["environment"]["python"], "what was captured stays"


def test_equal_text_stays_equal_and_another_key_hides_it_otherwise(monkeypatch) -> None:
    one, other = (redaction.Redaction.load("hash", key) for key in (KEY, KEY + "!"))
    assert one.free({"a": SECRET})["a"] == one.free([SECRET])[0] != other.free(SECRET)
    assert one.free("a-word.of/signs:1") == "a-word.of/signs:1"


def test_what_gives_tokens_away_beside_them_stays_out(opened, monkeypatch) -> None:
    monkeypatch.setenv("RLK_REDACTION_KEY", KEY)
    recorder = opened(redaction="hash")
    routes = {"digest": "sha256:" + "1" * 64, "coverage": 1.0, "layers": 1, "top_k": 1, "array": [3, 1]}
    api.record(
        "rollout.sample",
        sample_id="s",
        response_token_ids=[1, 2],
        loss_mask=[1, 1],
        support=[1, 2],
        support_offsets=[0, 1, 2],
        routed_experts=routes,
        sampling={"penalties": {"presence": 0.5, "31337": 1.0}},
    )
    api.record("boundary.captured", boundary="embed", order=0, digest="sum64x2:" + "a" * 32, values=[0.5], shape=[1])
    sample, tensor = read_spool(recorder.directory).events[2:]
    assert sorted(sample.arrays) == ["loss_mask", "response_token_ids"]
    assert sample.fields["routed_experts"]["digest"] != routes["digest"]
    assert sample.fields["sampling"]["penalties"] == {"presence": 0.5}
    assert tensor.arrays == {}
    assert tensor.fields["digest"].startswith("kblake2bx")


def test_a_short_key_is_refused_with_what_to_do(monkeypatch, opened) -> None:
    monkeypatch.setenv("RLK_REDACTION_KEY", "hunter2")
    with pytest.raises(Exception, match=r"7 characters .*openssl rand -hex 32"):
        opened(redaction="hash")


def test_a_spawned_child_redacts_as_its_parent_was_told_to(opened, monkeypatch) -> None:
    """The argument of init() reaches nobody else: without this a child would let out what the parent hides."""
    monkeypatch.setenv("RLK_REDACTION_KEY", KEY)
    opened(redaction="hash")
    assert api.os.environ["RLK_REDACTION"] == "hash"
    api.close(timeout=0)
    assert "RLK_REDACTION" not in api.os.environ
    monkeypatch.setenv("RLK_REDACTION", "hash")
    opened(redaction="none")
    assert api.os.environ["RLK_REDACTION"] == "none"


def test_init_says_once_what_redaction_costs(opened, monkeypatch, caplog) -> None:
    monkeypatch.setenv("RLK_REDACTION_KEY", KEY + "once")
    opened(redaction="hash")
    opened(redaction="hash")
    (said,) = [r.message for r in caplog.records if r.message.startswith("redaction: ")]
    assert "replay cannot score" in said
    assert KEY not in said


def test_tokens_get_a_name_that_only_the_key_can_make(opened, monkeypatch) -> None:
    opened(redaction="none")
    plain = api.token_name([1, 2, 3])
    monkeypatch.setenv("RLK_REDACTION_KEY", KEY)
    opened(redaction="hash")
    assert api.token_name([1, 2, 3]) == api.token_name([1, 2, 3]) not in (plain, None)
    opened(redaction="drop")
    assert api.token_name([1, 2, 3]) is None
