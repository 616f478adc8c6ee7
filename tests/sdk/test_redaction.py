"""Redaction: hash and drop let no token id out, keep equality, and leave everything else alone."""

import hashlib
import struct

import pytest

from rlk_ledger_schemas import fingerprints
from rlk_ledger_schemas.arrays import Array
from rlk_ledger_sdk import record
from rlk_ledger_sdk.testing import read_spool

KEY, OTHER = "correct horse battery", "staple correct horse"
SECRET_TOKENS = [31337, 31338, 31337]


def sample(**fields):
    return record(
        "rollout.sample",
        sample_id="s",
        response_token_ids=SECRET_TOKENS,
        loss_mask=[1, 0, 1],
        prompt_token_ids=[77777],
        token_digest=fingerprints.token_digest(SECRET_TOKENS),
        mask_digest=fingerprints.mask_digest([1, 0, 1]),
        support=[31337, 31338, 31337],
        support_offsets=[0, 1, 2, 3],
        **fields,
    )


def logprobs(**fields):
    return record("logprobs", sample_id="s", source="training", contract_id="c", values=[-1.0] * 3, **fields)


def stored(recorder):
    return read_spool(recorder.directory).events[2:]


def bytes_of(recorder):
    return b"".join(p.read_bytes() for p in recorder.directory.glob("*.spool"))


@pytest.mark.parametrize("mode", ["hash", "drop"])
def test_no_token_id_and_no_unkeyed_digest_reaches_the_disk(opened, monkeypatch, mode):
    monkeypatch.setenv("RLK_REDACTION_KEY", KEY)
    recorder = opened(redaction=mode)
    sample()
    logprobs(token_ids=SECRET_TOKENS, token_digest=fingerprints.token_digest(SECRET_TOKENS))
    data = bytes_of(recorder)
    for token in (31337, 31338, 77777):
        assert struct.pack("<i", token) not in data
    assert fingerprints.token_digest(SECRET_TOKENS).encode() not in data
    assert KEY.encode() not in data.replace(recorder.config.redaction.key_id.encode() if mode == "hash" else b"-", b"")
    assert sorted(stored(recorder)[0].arrays) == (
        ["loss_mask", "prompt_token_ids", "response_token_ids"] if mode == "hash" else ["loss_mask"]
    )


def test_none_changes_nothing(opened):
    recorder = opened(redaction="none")
    sample()
    event = stored(recorder)[0]
    assert event.arrays["response_token_ids"] == SECRET_TOKENS
    assert event.fields["token_digest"] == fingerprints.token_digest(SECRET_TOKENS)


def test_a_hashed_token_is_keyed_blake2b_of_position_and_id(opened, monkeypatch):
    monkeypatch.setenv("RLK_REDACTION_KEY", KEY)
    recorder = opened(redaction="hash")
    sample()
    raw = hashlib.blake2b(KEY.encode(), digest_size=32, person=b"rlk-redact-key").digest()
    expected = [
        int.from_bytes(hashlib.blake2b(struct.pack("<Qq", i, t), key=raw, digest_size=8).digest(), "little")
        for i, t in enumerate(SECRET_TOKENS)
    ]
    assert stored(recorder)[0].arrays["response_token_ids"] == expected


def test_equal_tokens_of_both_sides_stay_equal_and_repeated_ones_are_hidden(opened, monkeypatch):
    monkeypatch.setenv("RLK_REDACTION_KEY", KEY)
    recorder = opened(redaction="hash")
    sample()
    logprobs(token_ids=SECRET_TOKENS, token_digest=fingerprints.token_digest(SECRET_TOKENS))
    logprobs(token_ids=[*SECRET_TOKENS[1:], 1], start=1)
    one, two, late = stored(recorder)
    assert one.arrays["response_token_ids"] == two.arrays["token_ids"]
    assert one.fields["token_digest"] == two.fields["token_digest"]
    assert one.arrays["response_token_ids"][0] != one.arrays["response_token_ids"][2]
    assert late.arrays["token_ids"][:2] == one.arrays["response_token_ids"][1:]


def test_ids_of_64_bits_are_hashed_one_by_one(opened, monkeypatch):
    monkeypatch.setenv("RLK_REDACTION_KEY", KEY)
    recorder = opened(redaction="hash")
    wide = Array("uint64", struct.pack("<3Q", *SECRET_TOKENS[:2], 2**64 - 1))
    record("rollout.sample", sample_id="s", response_token_ids=SECRET_TOKENS, loss_mask=[1, 1, 1])
    record("rollout.sample", sample_id="s", response_token_ids=wide, loss_mask=[1, 1, 1])
    narrow, hashed = (event.arrays["response_token_ids"] for event in stored(recorder))
    assert len(hashed) == 3
    assert hashed[:2] == narrow[:2]


def test_a_redaction_never_shows_its_key(opened, monkeypatch):
    monkeypatch.setenv("RLK_REDACTION_KEY", KEY)
    config = opened(redaction="hash").config
    assert repr(config.redaction.key) not in repr(config)


def test_another_key_gives_other_hashes(opened, monkeypatch):
    found = []
    for key in (KEY, OTHER):
        monkeypatch.setenv("RLK_REDACTION_KEY", key)
        recorder = opened(redaction="hash")
        sample()
        found.append((stored(recorder)[0].arrays["response_token_ids"], recorder.config.redaction.key_id))
    assert not set(found[0][0]) & set(found[1][0])
    assert found[0][1] != found[1][1]


def test_the_header_and_the_run_name_the_redaction_and_its_key(opened, monkeypatch):
    monkeypatch.setenv("RLK_REDACTION_KEY", KEY)
    recorder = opened(redaction="hash")
    image = read_spool(recorder.directory)
    assert (image.header.redaction, image.header.redaction_key_id) == ("hash", recorder.config.redaction.key_id)
    assert image.events[0].fields["redaction"] == "hash"


def test_values_masks_and_other_digests_stay(opened, monkeypatch):
    monkeypatch.setenv("RLK_REDACTION_KEY", KEY)
    recorder = opened(redaction="hash")
    sample()
    logprobs()
    one, two = stored(recorder)
    assert one.arrays["loss_mask"] == [1, 0, 1]
    assert one.fields["mask_digest"] == fingerprints.mask_digest([1, 0, 1])
    assert two.arrays["values"] == [-1.0] * 3


@pytest.mark.parametrize("mode", ["hash", "drop"])
def test_the_gap_of_a_refused_event_holds_no_token_id(opened, monkeypatch, mode):
    monkeypatch.setenv("RLK_REDACTION_KEY", KEY)
    recorder = opened(redaction=mode, on_error="warn")
    record("rollout.sample", sample_id="s", response_token_ids=[1, 5000000031337], loss_mask=[1, 1])
    (gap,) = stored(recorder)
    assert (gap.type, gap.fields["kind"]) == ("gap", "rejected")
    assert "response_token_ids" in gap.fields["reason"]
    assert "31337" not in gap.fields["reason"]
