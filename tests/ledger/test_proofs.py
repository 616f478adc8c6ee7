"""Proof bundles: what is exported holds, and the script of 150 lines refuses everything else."""

import base64
import copy
import hashlib
import json
import subprocess
import sys
from pathlib import Path

import check_proof
import msgspec
import pytest

from rlk_ledger import checkpoints, cli, signing
from rlk_ledger.build import build, event
from rlk_ledger.ledger import Ledger, open_ledger
from rlk_ledger.prove import Diverged, NotCovered, encode_bundle, find_sample, parse_event, prove
from rlk_ledger.records import Record
from rlk_ledger_schemas.arrays import Array
from rlk_ledger_schemas.checkpoints import decode_checkpoint
from rlk_ledger_schemas.errors import LedgerError, UsageError

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "tools" / "check_proof.py"
RUN = "r1"
A, B, C = "0a" * 16, "0b" * 16, "0c" * 16


def life(writer: str, samples: int = 6) -> list[Record]:
    """A writer's life: opened, samples with arrays of several dtypes, closed."""
    out = [event(RUN, writer, 0, "writer.opened", role="rollout", rank=0, world_size=1)]
    for seq in range(1, samples + 1):
        fields = {"sample_id": f"{writer[:2]}-{seq}", "response_token_ids": [seq, 2, 3], "loss_mask": [1, 0, 1]}
        out.append(event(RUN, writer, seq, "rollout.sample", step=seq, reward=-1.5, **fields))
    return [*out, event(RUN, writer, samples + 1, "writer.closed", reason="done")]


@pytest.fixture(scope="module")
def signer(tmp_path_factory) -> signing.Signer:
    return signing.new_key(tmp_path_factory.mktemp("key") / "key.pem")


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    """Five receipts: two chains, of which the first has four segments."""
    url = str(tmp_path / "l")
    build(url, RUN, life(A) + life(B), per_segment=4)
    return build(url, RUN, life(C, 1))


def cover(ledger: Ledger, signer: signing.Signer | None = None):
    ledger.forget(RUN)
    return checkpoints.make(ledger.store, RUN, signer)


def exported(ledger: Ledger, writer: str, seq: int, **options) -> dict:
    ledger.forget(RUN)
    return json.loads(encode_bundle(prove(ledger.run(RUN), writer, seq, **options)))


def refused(document: dict, *arguments) -> str:
    with pytest.raises(Exception) as caught:  # noqa: PT011 - whatever it is, the script says "not proved"
        check_proof.check(document, *arguments)
    return str(caught.value)


# -- what is exported holds ------------------------------------------------------------------------------------------


def test_every_event_of_a_ledger_is_proved(ledger: Ledger, signer) -> None:
    cover(ledger, signer)
    seen = set()
    for record in open_ledger(ledger.url).run(RUN).records():
        document = exported(ledger, record.writer_id, record.seq)
        text = check_proof.check(document, [signer.vkey()])
        assert f"event {record.seq} of writer {record.writer_id} of run {RUN}" in text
        assert f"signed by {signer.vkey()}" in text
        for name, array in record.arrays.items():
            assert f"{name}: {len(array)} x {array.dtype}" in text
        envelope = base64.b64decode(document["event"]["envelope"])
        assert envelope == record.envelope
        assert base64.b64decode(document["event"]["leaf"]) == record.leaf
        seen.add((record.writer_id, record.seq))
    assert len(seen) == 19


def test_without_its_arrays_an_event_is_proved_by_their_digests(ledger: Ledger) -> None:
    cover(ledger)
    document = exported(ledger, A, 3, arrays=False)
    assert [set(array) for array in document["event"]["arrays"]] == [{"name", "dtype", "n", "sha256"}] * 2
    assert "event 3" in check_proof.check(document)
    assert "response_token_ids" in json.dumps(document)
    whole = exported(ledger, A, 3)["event"]["arrays"]
    for array, digest in zip(whole, document["event"]["arrays"]):
        assert hashlib.sha256(base64.b64decode(array["data"])).digest() == base64.b64decode(digest["sha256"])


def test_an_event_no_checkpoint_covers_yet_is_said_to_be_so(ledger: Ledger) -> None:
    with pytest.raises(NotCovered, match=r"receipt 0 of shipper .*, which no checkpoint covers yet"):
        prove(ledger.run(RUN), A, 3)
    cover(ledger)
    build(ledger.url, RUN, life("0d" * 16))
    ledger.forget(RUN)
    with pytest.raises(NotCovered):
        prove(ledger.run(RUN), "0d", 3)
    assert "event 3" in check_proof.check(exported(ledger, A, 3))


def test_what_is_not_there_is_named(ledger: Ledger) -> None:
    cover(ledger)
    with pytest.raises(LedgerError, match="holds no event 99 of writer"):
        prove(ledger.run(RUN), A, 99)
    with pytest.raises(LedgerError, match="has no writer 'ee'"):
        prove(ledger.run(RUN), "ee", 1)
    with pytest.raises(UsageError, match="3 writers of run 'r1' begin with '0'"):
        prove(ledger.run(RUN), "0", 1)
    for text in ("r1", "r1/0a", "r1/0a/x", "r1//1", "a/b/c/1", "r1/0a/-1", "r1/0a/²"):
        with pytest.raises(UsageError, match="names no event"):
            parse_event(text)
    assert parse_event("r1/0a/007")[1:] == ("0a", 7)


def test_a_hand_over_is_proved_from_the_receipt_that_is_covered(ledger: Ledger) -> None:
    """The same event in two receipts: one covered, one not, and the covered one's segment may be gone."""
    cover(ledger)
    build(ledger.url, RUN, life(A)[2:5])
    document = exported(ledger, A, 3)
    assert json.loads(document["receipt"])["n"] == 0
    cover(ledger)
    segment = json.loads(document["receipt"])["segment"]["name"]
    (Path(ledger.url) / "runs" / RUN / segment).unlink()
    other = exported(ledger, A, 3)
    assert other["receipt"] != document["receipt"]
    assert other["event"]["envelope"] == document["event"]["envelope"]
    assert "event 3" in check_proof.check(other)


def test_an_event_whose_segment_is_gone_proves_its_receipt_and_says_so(ledger: Ledger, signer) -> None:
    cover(ledger, signer)
    segment = json.loads(exported(ledger, A, 3)["receipt"])["segment"]["name"]
    (Path(ledger.url) / "runs" / RUN / segment).unlink()
    document = exported(ledger, A, 3)
    assert document["event"] is None
    assert "not in this bundle" in check_proof.check(document, [signer.vkey()])
    for change in ({"seq": 7}, {"seq": 4}, {"writer_id": B}, {"seq": "3"}, {"seq": None}, {"seq": 2.5}, {"seq": True}):
        refused({**document, **change})


@pytest.mark.parametrize("name", ["x\n  signed by somebody", "x\x1b[2K", "x\u2028y", "\u202ex"])
def test_no_name_in_a_bundle_writes_lines_of_the_verdict(name: str) -> None:
    """Whoever makes a ledger chooses its writers' names; what the checker prints is the checker's."""
    receipt = {"run_id": RUN, "writers": [{"writer_id": name, "first": 0, "last": 3}]}
    with pytest.raises(ValueError, match="no name of an event"):
        check_proof.follow({"event": None, "writer_id": name, "seq": 1}, receipt)


def test_a_redacted_event_proves_what_was_recorded(tmp_path: Path) -> None:
    url = str(tmp_path / "l")
    tokens = Array("uint64", b"".join(i.to_bytes(8, "little") for i in (2**63, 7, 1)))
    fields = {"sample_id": "s", "response_token_ids": tokens, "loss_mask": [1, 0, 1]}
    record = event(RUN, A, 0, "rollout.sample", **fields)
    ledger = build(url, RUN, [record], redaction="hash")
    cover(ledger)
    document = exported(ledger, A, 0)
    assert {a["name"]: a["dtype"] for a in document["event"]["arrays"]}["response_token_ids"] == "uint64"
    assert "event 0" in check_proof.check(document)


def test_a_ledger_that_contradicts_itself_exports_nothing(ledger: Ledger) -> None:
    cover(ledger)
    receipt = json.loads(exported(ledger, A, 3)["receipt"])
    path = Path(ledger.url) / "runs" / RUN / "receipt" / receipt["shipper"] / "00000000.json"
    good = path.read_bytes()
    path.write_bytes(good.replace(b'"wall_us":', b'"wall_us":1'))
    with pytest.raises(LedgerError, match=f"rlk-ledger verify {RUN}"):
        exported(ledger, A, 3)
    path.write_bytes(good)
    segment = Path(ledger.url) / "runs" / RUN / receipt["segment"]["name"]
    data = segment.read_bytes()
    segment.write_bytes(data[:100] + bytes((data[100] ^ 1,)) + data[101:])
    with pytest.raises(LedgerError, match="not those its receipt describes"):
        exported(ledger, A, 3)


# -- older checkpoints -----------------------------------------------------------------------------------------------


def grown(ledger: Ledger, signer=None, times: int = 3) -> list:
    """Checkpoints as the ledger grows."""
    out = [cover(ledger, signer)]
    for i in range(1, times):
        build(ledger.url, RUN, life(f"{i:02x}" * 16, 2), per_segment=2)
        out.append(cover(ledger, signer))
    return out


def test_a_checkpoint_kept_elsewhere_is_tied_to_the_newest(ledger: Ledger) -> None:
    made = grown(ledger, times=4)
    for kept in made:
        document = exported(ledger, A, 3, since=kept)
        assert (document["since"] is None) == (kept is made[-1])
        text = check_proof.check(document, (), kept.data.decode())
        assert "in one history with the one you kept" in text
        assert "UNSIGNED" not in text
        plain = "\n".join(kept.data.decode().split("\n")[:3]) + "\n\n"
        assert check_proof.check(document, (), plain) == text, "a kept checkpoint is known by its size and root"
    assert "does not continue the one you kept" in refused(exported(ledger, A, 3), (), made[0].data.decode())
    assert "does not continue the one you kept" in refused(
        exported(ledger, A, 3, since=made[0]), (), made[1].data.decode()
    )


def test_a_kept_checkpoint_vouches_for_nothing_that_came_after_it(ledger: Ledger, signer) -> None:
    made = grown(ledger, signer)
    writer = "02" * 16
    document = exported(ledger, writer, 1, since=made[0])
    assert "older than the event" in refused(document, (), made[0].data.decode())
    assert "signed by" in check_proof.check(document, [signer.vkey()], made[0].data.decode())
    assert "one history" in check_proof.check(exported(ledger, writer, 1), (), made[-1].data.decode())


def test_a_history_that_was_rewritten_is_not_tied_to_the_old_one(ledger: Ledger, tmp_path: Path) -> None:
    kept = cover(ledger)
    info = json.loads((Path(ledger.url) / "ledger.json").read_bytes())
    url = str(tmp_path / "forged")
    build(url, RUN, life(A) + life(B), per_segment=8)
    forged = open_ledger(url)
    cover(forged)
    with pytest.raises(UsageError, match="--since: that checkpoint is of rlk-ledger/"):
        exported(forged, A, 3, since=kept)
    assert forged.info.ledger_id != info["ledger_id"]
    moved = kept._replace(origin=checkpoints.origin(forged.info.ledger_id, RUN))
    with pytest.raises(Diverged, match="its history was rewritten or cut"):
        exported(forged, A, 3, since=moved)


# -- the script: every changed bit -----------------------------------------------------------------------------------


@pytest.fixture
def signed(ledger: Ledger, signer) -> tuple[bytes, list[str], str]:
    """A bundle's bytes with everything in it, the key, and a checkpoint kept elsewhere."""
    kept = grown(ledger, signer, 2)[0]
    data = encode_bundle(prove(open_ledger(ledger.url).run(RUN), A, 5, since=kept))
    return data, [signer.vkey()], kept.data.decode()


def holds(data: bytes, vkeys=(), kept=None) -> bool:
    try:
        check_proof.check(json.loads(data), vkeys, kept)
    except Exception:
        return False
    return True


def test_every_single_flipped_bit_of_a_signed_bundle_is_refused(signed) -> None:
    data, vkeys, kept = signed
    document = json.loads(data)
    assert holds(data, vkeys, kept)
    slow, odd = [], []
    for i in range(len(data) * 8):
        changed = bytearray(data)
        changed[i // 8] ^= 1 << (i % 8)
        try:
            same = json.loads(bytes(changed)) == document
        except ValueError:
            continue  # no JSON any more: refused
        if same or not holds(bytes(changed)):  # the cheap checks first: without a key
            odd += [i] if same else []
        else:
            slow.append(i)
    assert odd == [], "every byte of the file means something"
    lines = [i for i in slow if holds(_flipped(data, i), vkeys, kept)]
    assert lines == []
    assert 200 < len(slow) < 2000, "what only the signature covers: the signature line itself"


def _flipped(data: bytes, i: int) -> bytes:
    changed = bytearray(data)
    changed[i // 8] ^= 1 << (i % 8)
    return bytes(changed)


def test_every_single_flipped_bit_of_an_unsigned_bundle_is_refused(ledger: Ledger) -> None:
    """Without a signature the bundle still is one whole: the checkpoint's `self` covers its text."""
    cover(ledger)
    for options in ({}, {"arrays": False}):
        data = encode_bundle(prove(open_ledger(ledger.url).run(RUN), A, 5, **options))
        assert holds(data)
        assert [i for i in range(len(data) * 8) if holds(_flipped(data, i))] == []


def test_every_flipped_bit_of_the_kept_checkpoint_and_of_the_key_is_refused(signed) -> None:
    """Of the checkpoint what counts: origin, size and root. A changed key is no key, or another one."""
    data, vkeys, kept = signed
    document = json.loads(data)
    head = len("\n".join(kept.split("\n")[:3]).encode())
    for i in range(head * 8):
        changed = _flipped(kept.encode(), i).decode(errors="replace")
        assert refused(document, (), changed), f"bit {i}"
    name = vkeys[0].index("+") + 10
    for i in range(name * 8, len(vkeys[0]) * 8):
        changed = _flipped(vkeys[0].encode(), i).decode(errors="replace")
        assert refused(document, [changed]), f"bit {i}"


def test_parts_of_two_bundles_make_no_bundle(ledger: Ledger) -> None:
    cover(ledger)
    one, two = exported(ledger, A, 2), exported(ledger, B, 5)
    checked = 0
    for mask in range(1, 2 ** len(one) - 1):
        mixed = {key: (two if mask >> i & 1 else one)[key] for i, key in enumerate(one)}
        if mixed not in (one, two):
            refused(mixed)
            checked += 1
    assert checked > 300
    event_parts = one["event"].keys()
    for key in event_parts:
        mixed = copy.deepcopy(one)
        mixed["event"][key] = two["event"][key]
        if mixed != one:
            refused(mixed)


HOSTILE = [
    {"log": {"index": True, "path": []}},
    {"log": {"index": 10**40, "path": []}},
    {"log": {"index": 0, "path": ["A" * 44] * 5000}},
    {"log": {"index": 0.0, "path": []}},
    {"log": {"index": -1, "path": []}},
    {"since": {}},
    {"since": {"size": 2**4000, "root": "A" * 43 + "=", "path": []}},
    {"since": {"size": True, "root": "A" * 43 + "=", "path": ["A" * 43 + "="] * 3}},
    {"since": 3},
    {"receipt": "{}"},
    {"receipt": None},
    {"receipt": "[" * 100_000},
    {"checkpoint": ""},
    {"checkpoint": "\n\n"},
    {"checkpoint": "a\n٣\nb\n\n"},
    {"event": {}},
    {"event": []},
    {"kind": "something else"},
    {"format": 2},
    {"more": 1},
]


def test_hostile_shapes_are_refused_in_one_sentence(ledger: Ledger, tmp_path: Path) -> None:
    cover(ledger)
    path, good = tmp_path / "bundle.json", exported(ledger, A, 3)
    for change in HOSTILE:
        path.write_text(json.dumps({**good, **change}))
        done = script(path)
        assert (done.returncode, done.stdout) == (1, ""), change
        assert done.stderr.startswith("not proved: "), change
        assert "Traceback" not in done.stderr
    for content in (b"", b"\xff", b"[" * 100_000, b"{"):
        path.write_bytes(content)
        done = script(path)
        assert done.returncode == 2, content[:3]
        assert "Traceback" not in done.stderr
    path.write_text("[]")
    assert script(path).returncode == 1


# -- the script as a program -----------------------------------------------------------------------------------------


def script(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-I", "-S", str(SCRIPT), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, cwd="/")


def test_the_script_is_at_most_150_lines_of_the_standard_library() -> None:
    lines = SCRIPT.read_text().splitlines()
    assert len(lines) <= 150
    assert max(map(len, lines)) <= 120
    assert "rlk_ledger" not in "".join(line for line in lines if "import" in line)


def test_the_script_runs_alone_and_its_exit_codes_are_those_it_names(signed, tmp_path: Path, signer) -> None:
    data, (vkey,), kept = signed
    bundle, note, key = tmp_path / "b.json", tmp_path / "kept", tmp_path / "key.txt"
    bundle.write_bytes(data)
    note.write_text(kept)
    key.write_text(vkey + "\n")
    done = script(bundle, "--key", vkey, "--checkpoint", note)
    assert (done.returncode, done.stderr) == (0, "")
    assert "signed by" in done.stdout
    assert "one history" in done.stdout
    assert "not proved: that what was recorded is true" in done.stdout
    assert script(bundle, "--key", key).returncode == 0
    alone = script(bundle)
    assert alone.returncode == 0
    assert "UNSIGNED as far as you asked: only as good as this copy of the checkpoint" in alone.stdout
    stranger = signing.new_key(tmp_path / "other.pem").vkey()
    assert script(bundle, "--key", stranger).returncode == 1
    assert script(bundle, "--key", vkey, "--key", stranger).returncode == 1, "each key that is given has to have signed"
    bundle.write_bytes(data.replace(b'"seq": 5', b'"seq": 6'))
    assert script(bundle).returncode == 1
    for wrong in (["nothing.json"], [], [bundle, "--frobnicate"], [note], [bundle, "--checkpoint", "nothing"]):
        assert script(*wrong).returncode == 2, wrong


# -- the command -----------------------------------------------------------------------------------------------------


def run(capsys, *arguments: str) -> tuple[int, str, str]:
    code = cli.main(list(arguments))
    out = capsys.readouterr()
    return code, out.out, out.err


def test_prove_on_the_command_line(capsys, ledger: Ledger, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.delenv("RLK_LEDGER", raising=False)
    monkeypatch.delenv("RLK_SIGNING_KEY", raising=False)
    place = ("--ledger", ledger.url)
    code, out, err = run(capsys, "prove", f"{RUN}/0a/3", *place)
    assert (code, out) == (3, "")
    assert f"`rlk-ledger checkpoint {RUN} --ledger {ledger.url}` covers it, or --checkpoint-now" in err
    code, out, err = run(capsys, "prove", f"{RUN}/0a/3", "--checkpoint-now", *place)
    assert (code, err) == (0, "")
    assert "event 3" in check_proof.check(json.loads(out))
    target = tmp_path / "bundle.json"
    code, out, _ = run(capsys, "prove", f"{RUN}/{A}/3", "-o", str(target), *place)
    assert code == 0
    assert f"check it anywhere: python -I -S check_proof.py {target}" in out
    assert script(target).returncode == 0
    code, out, _ = run(capsys, "prove", f"{RUN}/{A}/3", "-o", str(target), "--json", *place)
    assert json.loads(out)["bundle"] == str(target)
    assert run(capsys, "prove", f"{RUN}/{A}/77", *place)[0] == 2
    assert run(capsys, "prove", RUN, *place)[0] == 2


def test_prove_by_sample(capsys, tmp_path: Path) -> None:
    url = str(tmp_path / "l")
    sample = {"sample_id": "s/1", "response_token_ids": [1], "loss_mask": [1]}
    score = {"sample_id": "s/1", "contract_id": "c", "values": [0.5]}
    ledger = build(
        url,
        RUN,
        [
            event(RUN, A, 0, "rollout.sample", **sample),
            event(RUN, A, 1, "logprobs", source="rollout", **score),
            event(RUN, B, 0, "logprobs", source="training", **score),
            event(RUN, B, 1, "rollout.sample", **{**sample, "sample_id": "other"}),
        ],
    )
    cover(ledger)
    assert {(str(name), kind) for name, kind in find_sample(open_ledger(url).run(RUN), "s/1")} == {
        (f"{RUN}/{A}/0", "rollout.sample"),
        (f"{RUN}/{A}/1", "logprobs"),
        (f"{RUN}/{B}/0", "logprobs"),
    }
    code, out, _ = run(capsys, "prove", RUN, "--sample", "s/1", "--ledger", url)
    assert code == 0
    assert '"sample_id": "s/1"' in check_proof.check(json.loads(out))
    code, _, err = run(capsys, "prove", RUN, "--sample", "s/1", "--type", "logprobs", "--ledger", url)
    assert code == 2
    assert f"{RUN}/{A}/1  logprobs" in err
    assert f"{RUN}/{B}/0  logprobs" in err
    assert "rollout.sample" not in err
    code, _, err = run(capsys, "prove", RUN, "--sample", "nobody", "--ledger", url)
    assert code == 2
    assert "holds no event of sample 'nobody'" in err


def test_since_on_the_command_line(capsys, ledger: Ledger, tmp_path: Path) -> None:
    made = grown(ledger)
    kept = tmp_path / "kept"
    kept.write_bytes(made[0].data)
    code, out, _ = run(capsys, "prove", f"{RUN}/{A}/3", "--since", str(kept), "--ledger", ledger.url)
    assert code == 0
    assert json.loads(out)["since"]["size"] == made[0].size
    folder = Path(ledger.url) / "runs" / RUN
    first = decode_checkpoint((folder / "checkpoint" / "00000000").read_bytes(), "x")
    assert first.root == made[0].root
    for path in sorted((folder / "checkpoint").iterdir()):
        path.unlink()
    for path in sorted((folder / "index").glob("*")):
        path.unlink()
    kept.write_bytes(made[-1].data)
    victim = next((folder / "receipt").rglob("00000000.json"))
    victim.write_bytes(_rewritten(victim.read_bytes()))
    for path in victim.parent.glob("0000000[1-9].json"):
        path.unlink()
    cover(ledger)
    other = json.loads(victim.read_bytes())["writers"][0]
    code, out, err = run(
        capsys, "prove", f"{RUN}/{other['writer_id']}/{other['first']}", "--since", str(kept), "--ledger", ledger.url
    )
    assert (code, out) == (1, "")
    assert "its history was rewritten or cut" in err


def _rewritten(data: bytes) -> bytes:
    from rlk_ledger_schemas.objects import decode_receipt, encode_receipt

    return encode_receipt(msgspec.structs.replace(decode_receipt(data, "x"), wall_us=1))
