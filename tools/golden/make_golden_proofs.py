"""Makes the second golden ledger of format 1: what makes a ledger believable, and its twin file.

    python tools/golden/make_golden_proofs.py tests/conformance

writes `golden-1-proofs/` (signed receipts, checkpoints and their indexes, a tombstone with the segment it speaks of
gone, holds, a seal, tokens under `redaction = hash`), `golden-1-proofs-anchor/` (one of its checkpoints, elsewhere) and
`golden-1-proofs.json`: everything in them, decoded, and what `verify` says under every option. From fixed ids, clocks
and keys; made once and kept. Needs `cryptography`.
"""

import base64
import json
import sys
from pathlib import Path
from typing import Any

import msgspec

from rlk_ledger import checkpoints, index, layout, seals
from rlk_ledger.anchors import anchor
from rlk_ledger.audit import audit
from rlk_ledger.chain import Chain, Ending
from rlk_ledger.contact import meet
from rlk_ledger.history import load_history
from rlk_ledger.holds import read_holds
from rlk_ledger.ledger import open_ledger
from rlk_ledger.receipts import Receipts
from rlk_ledger.records import Record, make_record
from rlk_ledger.segments import read_records
from rlk_ledger.signing import Signer, text_of
from rlk_ledger.store import FileStore, open_store
from rlk_ledger.tombstones import TYPE, statements
from rlk_ledger.verify import verify
from rlk_ledger_schemas.checkpoints import Checkpoint
from rlk_ledger_schemas.codec import decode_envelope
from rlk_ledger_schemas.events import SCHEMA_VERSION, check_fields, encode
from rlk_ledger_schemas.fingerprints import contract_id, sha256, token_digest
from rlk_ledger_schemas.holds import Hold, encode_hold
from rlk_ledger_schemas.objects import LedgerInfo, Receipt, RunInfo, encode_object
from rlk_ledger_sdk.redaction import Redaction

RUN = "golden-proofs"
ROLLOUT, TRAINING, OPERATOR = "1a" * 16, "2b" * 16, "3c" * 16
SHIPPERS = ("4d" * 16, "5e" * 16, "6f" * 16)
LEDGER_ID = "7a" * 16
START_NS = 1_800_000_000_000_000_000
REDACTION = Redaction.load("hash", "the key of the golden ledger")
BODY = {"mode": "processed", "temperature": 1.0}
HELD, FREED = "0123456789abcdef", "fedcba9876543210"


def signer(number: int) -> Signer:
    """Key `number`: Ed25519 over 32 equal bytes. Everybody knows it; it guards nothing."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    return Signer(Ed25519PrivateKey.from_private_bytes(bytes([number]) * 32), kept=True)


def clock(tick: int) -> int:
    """Microseconds since the epoch of a step of the making."""
    return START_NS // 1000 + tick * 1_000_000


def redacted(writer_id: str, seq: int, type_name: str, **fields: Any) -> Record:
    """The event as a recorder under `redaction = hash` writes it."""
    assigned = {
        "schema_version": SCHEMA_VERSION,
        "seq": seq,
        "wall_ns": START_NS + seq * 1000,
        "mono_ns": seq,
        "run_id": RUN,
        "writer_id": writer_id,
    }
    wire, arrays = check_fields(type_name, fields, assigned)
    arrays = REDACTION.apply(type_name, wire, arrays)
    return make_record(encode(wire), arrays)


def opening(writer_id: str, role: str) -> list[Record]:
    """How a writer opens: the run, itself, its contract."""
    run = {"roles": {"rollout": 1, "training": 1}, "redaction": "hash", "redaction_key_id": REDACTION.key_id}
    return [
        redacted(writer_id, 0, "run.opened", **run, job={"name": "golden", "note": "text that is hidden"}),
        redacted(writer_id, 1, "writer.opened", role=role, rank=0, world_size=1),
        redacted(writer_id, 2, "contract.declared", kind="logprob", version="1", body=BODY),
    ]


def rollout_step(seq: int, step: int) -> list[Record]:
    """A sample with all that redaction changes, and its scores."""
    tokens = [step, 7, 31337, step + 1]
    sample = {
        "sample_id": f"s{step}",
        "prompt_token_ids": [1, 2, 3],
        "response_token_ids": tokens,
        "loss_mask": [1, 1, 1, 0],
        "token_digest": token_digest(tokens),
        "group_id": "a name that is text",
        "weight_spans": [{"version": "v0", "start": 0, "end": 4}],
        "support": [5, 7],
        "support_offsets": [0, 1, 1, 2, 2],
        "step": step,
        "labels": {"file": "sha256:" + "5" * 64, "lane": "a"},
    }
    return [redacted(ROLLOUT, seq, "rollout.sample", **sample), score(ROLLOUT, seq + 1, step, "rollout", tokens)]


def score(writer_id: str, seq: int, step: int, source: str, tokens: list[int]) -> Record:
    """One side's values of a sample, with the digest and the ids of what it scored."""
    return redacted(
        writer_id,
        seq,
        "logprobs",
        sample_id=f"s{step}",
        source=source,
        contract_id=contract_id("logprob", "1", BODY),
        values=[-0.5, -1.25 - step, -2.0, -0.125],
        token_ids=tokens,
        token_digest=token_digest(tokens),
        weight_version="v0",
        step=step,
    )


def make(folder: Path) -> None:
    """Writes golden-1-proofs/ and golden-1-proofs.json into `folder`."""
    store = open_store(str(folder / "golden-1-proofs"))
    assert isinstance(store, FileStore)
    ledger = LedgerInfo(
        format=1,
        hash="sha256",
        ledger_id=LEDGER_ID,
        required_features=(),
        created_us=clock(0),
        put_if_absent="honoured",
    )
    store.create(layout.LEDGER, encode_object(ledger))
    info = RunInfo(
        format=1,
        ledger_id=LEDGER_ID,
        run_id=RUN,
        roles={"rollout": 1, "training": 1},
        mode={"fast": "off", "consistency": "audit"},
        redaction="hash",
        redaction_key_id=REDACTION.key_id,
        created_us=clock(0),
    )
    store.create(layout.run_json(RUN), encode_object(info))  # before `meet`, which would probe with random bytes
    contact = meet(store, info)
    first = Chain(store, contact, SHIPPERS[0], lambda: clock(1), signer(1))
    second = Chain(store, contact, SHIPPERS[1], lambda: clock(2), signer(2))
    gap = redacted(ROLLOUT, 7, "gap", kind="bulk", first=5, last=6, reason="budget")
    opened = opening(ROLLOUT, "rollout")
    pruned = first.publish(first.draft([*opened, *rollout_step(3, 0), gap]))
    checkpoints.make(store, RUN, signer(9), wall_us=lambda: clock(3))
    first.publish(first.draft(rollout_step(8, 1)))
    training = [*opening(TRAINING, "training"), score(TRAINING, 3, 0, "training", [0, 7, 31337, 1])]
    training.append(score(TRAINING, 4, 1, "training", [1, 7, 31337, 2]))
    second.publish(second.draft(training[:4]))
    closed = redacted(ROLLOUT, 10, "writer.closed", reason="done")
    checkpoints.make(store, RUN, signer(9), wall_us=lambda: clock(4))
    anchor(store, RUN, str(anchor_of(folder / "golden-1-proofs")))
    second.publish(second.draft([*training[4:], closed], {TRAINING: Ending(12, 4)}))
    prune(store, Chain(store, contact, SHIPPERS[2], lambda: clock(5), signer(3)), pruned)
    hold(store, HELD, clock(6))
    hold(store, FREED, clock(6))
    hold(store, FREED, clock(7), released=True)
    seals.seal(store, RUN, signer=signer(9), wall_us=lambda: clock(8))
    first.publish(first.draft([redacted(ROLLOUT, 11, "writer.closed", reason="again")]))
    text = json.dumps(twin(folder / "golden-1-proofs"), indent=1, sort_keys=True, ensure_ascii=False)
    (folder / "golden-1-proofs.json").write_text(text + "\n")


def anchor_of(root: Path) -> Path:
    """Where checkpoint 1 of the ledger at `root` is anchored."""
    return root.with_name(f"{root.name}-anchor")


def prune(store: FileStore, chain: Chain, receipt: Receipt) -> None:
    """What `rlk-ledger prune` does to one segment, at fixed ids and clocks."""
    path = layout.segment_path(RUN, receipt.segment.name)
    described = msgspec.to_builtins(receipt.segment)
    entry = {**described, "statements": list(statements(read_records(store.read(path))))}
    said = {"by": "ann@ops", "policy": {"before_step": 1}, "reason": "90 days"}
    chain.publish(
        chain.draft(
            [
                redacted(OPERATOR, 0, "writer.opened", role="retention", rank=0, world_size=1),
                redacted(OPERATOR, 1, TYPE, segments=[entry], **said),
                redacted(OPERATOR, 2, "writer.closed", reason="close"),
            ]
        )
    )
    checkpoints.make(store, RUN, signer(9), wall_us=lambda: clock(5))
    store.delete(path)


def hold(store: FileStore, hold_id: str, wall_us: int, released: bool = False) -> None:
    """Places or releases a hold."""
    one = Hold(
        format=1,
        ledger_id=LEDGER_ID,
        run_id=RUN,
        hold_id=hold_id,
        by="counsel",
        reason="litigation",
        released=released or None,
        wall_us=wall_us,
    )
    store.create(layout.hold_path(RUN, hold_id, released), encode_hold(one))


def options() -> dict[str, dict[str, Any]]:
    """Every way to ask `verify`, by name; `copy` stands for checkpoint 0 as somebody kept it, `anchor` for its URL."""
    return {
        "plain": {},
        "deep": {"deep": True},
        "copy": {"checkpoints": ["copy"]},
        "key": {"keys": [signer(9).public_key]},
        "other key": {"keys": [signer(8).public_key]},
        "anchor": {"anchor": "anchor"},
        "all": {"checkpoints": ["copy"], "keys": [signer(9).public_key], "deep": True, "anchor": "anchor"},
    }


def verified(root: Path, asked: dict[str, Any]) -> dict[str, Any]:
    """What verify says, without its sentences: those may be improved."""
    store = open_store(str(root))
    given = dict(asked)
    if "checkpoints" in given:
        given["checkpoints"] = [checkpoints.read_checkpoint(store, RUN, 0)]
    if "anchor" in given:
        given["anchor"] = str(anchor_of(root))
    found = verify(store, **given)
    places = ("kind", "severity", "object", "writer", "first", "last", "byte", "end_byte")
    rows = [{name: value for name in places if (value := getattr(f, name)) is not None} for f in found.findings]
    counts = {name: getattr(found, name) for name in ("runs", "receipts", "segments", "events", "bytes")}
    return {
        "exit_code": int(found.exit_code),
        "verdict": found.verdict,
        "findings": rows,
        "covered": [msgspec.to_builtins(covered) for covered in found.checkpoints],
        **counts,
    }


def twin(root: Path) -> dict[str, Any]:
    """Everything the ledger holds, decoded, and what commands say of it."""
    ledger = open_ledger(str(root))
    run, store = ledger.run(RUN), ledger.store
    pruned = run.pruned()
    assert pruned is not None
    there = open_store(str(anchor_of(root)))
    paths = [entry.path for entry in store.list(layout.run_root(RUN))]
    history = load_history(ledger, RUN)
    return {
        "objects": paths,
        "ledger": json.loads(store.read(layout.LEDGER)),
        "run": json.loads(store.read(layout.run_json(RUN))),
        "events": [_event(r) for r in sorted(run.records(), key=lambda r: (r.writer_id, r.seq))],
        "receipts": {p: json.loads(store.read(p)) for p in paths if "/receipt/" in p},
        "checkpoints": {
            layout.checkpoint_path(RUN, c.k): _checkpoint(c) for c in checkpoints.read_checkpoints(store, RUN)
        },
        "indexes": {p: _index(store.read(p), p) for p in paths if "/index/" in p},
        "anchor": {e.path: sha256(there.read(e.path)) for e in there.list("")},
        "holds": {p: json.loads(store.read(p)) for p in paths if "/hold/" in p},
        "standing": [state.hold_id for state in read_holds(store, RUN) if state.stands],
        "seal": json.loads(store.read(layout.seal_path(RUN))),
        "pruned": {**pruned._asdict(), "graves": sorted(run.graves().by_name)},
        "tokens": {s.sample_id: s.response_token_ids.tolist() for s in history.samples},
        "audit": [[f.finding_id, f.severity] for f in audit(history).findings],
        "keys": {str(n): text_of(signer(n).public_key) for n in (1, 2, 3, 9)},
        "verify": {name: verified(root, asked) for name, asked in options().items()},
    }


def _event(record: Record) -> dict[str, Any]:
    fields = decode_envelope(record.envelope)
    if fields["type"] == TYPE:
        for entry in fields["segments"]:
            entry["statements"] = [envelope.hex() for envelope in entry.get("statements", ())]
    return {
        "envelope": record.envelope.hex(),
        "fields": fields,
        "arrays": {name: {"dtype": a.dtype, "bytes": a.data.hex()} for name, a in sorted(record.arrays.items())},
        "leaf": record.leaf.hex(),
    }


def _checkpoint(checkpoint: Checkpoint) -> dict[str, Any]:
    return {
        "digest": checkpoint.digest,
        "origin": checkpoint.origin,
        "size": checkpoint.size,
        "root": base64.b64encode(checkpoint.root).decode(),
        "info": msgspec.to_builtins(checkpoint.info),
        "leaves": [leaf.hex() for leaf in checkpoint.leaves],
        "signatures": [[s.name, s.key_id.hex(), s.signature.hex()] for s in checkpoint.signatures],
    }


def _index(data: bytes, path: str) -> dict[str, Any]:
    part = index.decode(data, path)
    rows = Receipts(part.table, LEDGER_ID, RUN).all
    return {"info": msgspec.to_builtins(part.info), "receipts": [msgspec.to_builtins(row) for row in rows]}


if __name__ == "__main__":
    make(Path(sys.argv[1]))
