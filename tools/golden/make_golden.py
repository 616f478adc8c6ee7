"""Makes the golden ledger of format 1 and its twin file, from fixed ids and clocks.

    python tools/golden/make_golden.py tests/conformance

writes `golden-1/` (a ledger) and `golden-1.json` (everything in it, decoded). They are made once for a format version
and kept: a reader of any later version must still read them to exactly the twin.
"""

import json
import struct
import sys
from pathlib import Path
from typing import Any

from rlk_ledger import layout
from rlk_ledger.build import event
from rlk_ledger.chain import Chain, Ending
from rlk_ledger.contact import meet
from rlk_ledger.ledger import open_ledger
from rlk_ledger.records import Record, make_record
from rlk_ledger.store import open_store
from rlk_ledger_schemas.arrays import Array
from rlk_ledger_schemas.codec import decode_envelope, encode_payload
from rlk_ledger_schemas.events import encode
from rlk_ledger_schemas.fingerprints import contract_id, mask_digest, sha256, token_digest
from rlk_ledger_schemas.frame import SpoolHeader, crc_seed, encode_header, frame_crc, frame_size
from rlk_ledger_schemas.objects import LedgerInfo, RunInfo, encode_object

RUN = "golden-run"
ROLLOUT, TRAINING, DEAD = "a1" * 16, "b2" * 16, "c3" * 16
SHIPPERS = ("d4" * 16, "e5" * 16)
LEDGER_ID = "f6" * 16
START_NS = 1_700_000_000_000_000_000
DIGEST = "sha256:" + "12" * 32
# +inf, -inf, two NaNs with payloads, -0.0, the smallest subnormal, an ordinary value
ODD = Array("float32", struct.pack("<7I", 0x7F800000, 0xFF800000, 0x7FC00001, 0xFFC12345, 0x80000000, 1, 0xBFC00000))
TOKENS = [5, 0, 151_935, 7, 7, 42, 1]
MASK = [1, 1, 0, 0, 1, 1, 1]
BODY = {"mode": "processed", "temperature": 0.7, "head_dtype": "bfloat16", "execution_path": "decode"}
Listed = tuple[str, dict[str, Any]]
"""An event type and its fields."""
_SHARED: dict[str, Any] = {"step": 3, "rollout_id": "r-1", "attempt": 0, "labels": {"team": "a"}}


def _sample() -> dict[str, Any]:
    """A rollout sample with every field it can have."""
    return {
        "sample_id": "s0",
        "response_token_ids": TOKENS,
        "loss_mask": MASK,
        "prompt_token_ids": [1, 2, 3],
        "prompt_id": "p0",
        "group_id": "g0",
        "session_id": "chat",
        "turn": 2,
        "position_ids": [3, 4, 5, 6, 7, 8, 9],
        "token_digest": token_digest(TOKENS),
        "mask_digest": mask_digest(MASK),
        "tokenizer": "bytes",
        "sampling": {
            "temperature": 0.7,
            "top_p": 0.9,
            "top_k": 50,
            "min_p": 0.0,
            "penalties": {"presence": 0.5},
            "seed": 11,
            "n": 4,
        },
        "finish_reason": "stop",
        "status": "completed",
        "reward": -0.25,
        "weight_spans": [{"version": "v1", "start": 0, "end": 4}, {"version": "v2", "start": 4, "end": 7}],
        "stamp_rule": "per_token",
        "engine": "vllm-0",
        "model": "tiny",
        "cache": {"cached_tokens": 2, "writer_version": "v1", "block_size": 16},
        "chunks": [0, 2],
        "spec": {"drafted": 3, "accepted": 1},
        "routed_experts": {"digest": DIGEST, "coverage": 1.0, "layers": 1, "top_k": 1, "array": [0, 1, 0, 1, 0, 1, 0]},
        "kept_mass": [1.0, 0.5, 1.0, 1.0, 0.75, 1.0, 1.0],
        "support": [5, 0, 1],
        "support_offsets": [0, 1, 2, 3, 3, 3, 3, 3],
        "metadata_source": {"engine": "measured", "model": "defaulted"},
    }


def _openings() -> list[Listed]:
    """How the rollout writer opens the run."""
    return [
        (
            "run.opened",
            {
                "roles": {"rollout": 1, "training": 1},
                "mode": {"fast": "off", "consistency": "audit"},
                "job": {"name": "golden"},
                "redaction": "none",
                "lineage": {"run": "before", "step": 2},
                "sampling_policy": {"bodies": 1.0},
            },
        ),
        (
            "writer.opened",
            {
                "role": "rollout",
                "rank": 0,
                "world_size": 1,
                "parallel": {"tp": {"rank": 0, "size": 2}},
                "engine": {"name": "vllm", "version": "0", "instance": "i0", "server_group": "s"},
                "host": "node-1",
                "pid": 4242,
                "environment": {"python": "3.11"},
                "revision": {"commit": "abc", "dirty": "def"},
            },
        ),
    ]


def _decisions() -> list[Listed]:
    """What the rollout side computes with."""
    return [
        ("contract.declared", {"kind": "logprob", "version": "1", "body": BODY}),
        (
            "knob.applied",
            {
                "path": "engine.batch_invariant",
                "requested": True,
                "materialized": True,
                "actual": False,
                "status": "fallback",
                "evidence": "readback",
                "lifecycle": "engine",
            },
        ),
        (
            "operator.decided",
            {
                "operator": "attention",
                "side": "rollout",
                "requested_backend": "a",
                "actual_backend": "b",
                "fallback": True,
                "mode": {"fast": "off"},
                "contract_id": DIGEST,
                "bucket": "native",
                "reason": "shape",
                "rejected": [{"backend": "a", "reason": "shape"}],
            },
        ),
        (
            "collective.observed",
            {
                "op": "all_reduce",
                "group": "tp",
                "group_size": 2,
                "reduction_order": "global_rank_index",
                "accumulate_dtype": "float32",
                "downcast_point": "end",
                "determinism": "topology_stable",
                "backend": "nccl",
            },
        ),
    ]


def _samples() -> list[Listed]:
    """What the rollout side samples, and from which weights."""
    redacted = Array("uint64", struct.pack("<3Q", 2**64 - 1, 0, 2**63))
    return [
        (
            "weights.loaded",
            {
                "weight_version": "v2",
                "digest": DIGEST,
                "tensor_count": 2,
                "engine": "vllm-0",
                "what": "holds",
                "adapters": [{"name": "lora", "digest": DIGEST}],
                "skipped": ["lm_head"],
                "tensors": [{"name": "w", "digest": DIGEST, "dtype": "bfloat16", "shape": [2, 3]}],
                "caches_flushed": True,
                "path": "/w",
                "file_digest": DIGEST,
            },
        ),
        ("prompt.recorded", {"prompt_id": "p0", "token_ids": [1, 2, 3], "prefix_of": "p-"}),
        ("rollout.sample", _sample()),
        ("rollout.sample", {"sample_id": "redacted", "response_token_ids": redacted, "loss_mask": [1, 0, 1]}),
        (
            "logprobs",
            {
                "sample_id": "s0",
                "source": "rollout",
                "contract_id": contract_id("logprob", "1", BODY),
                "values": ODD,
                "start": 0,
                "value_class": [1, 1, 2, 2, 0, 0, 0],
                "dtype": "float32",
                "weight_version": "v1",
                "pass_id": "p",
                "layout_id": "l0",
                "token_digest": token_digest(TOKENS),
                "mask_digest": mask_digest(MASK),
                "token_ids": TOKENS,
                "entropy": [0.0] * 7,
                "metadata_source": {"dtype": "derived"},
            },
        ),
    ]


def rollout_events() -> list[Listed]:
    """What the rollout side records, every field of every type it uses."""
    return _openings() + _decisions() + _samples()


def _scores() -> list[Listed]:
    """What the training side records of its weights, batches and scores."""
    shard = {"axis": "sequence", "rank": 0, "world_size": 2, "ranges": [[0, 2], [5, 6]]}
    three = {"max": [1.0, 2.0, 3.0], "sum_exp": [1.5, 1.25, 1.0], "target_logit": [0.5, -0.0, 3.0]}
    return [
        ("writer.opened", {"role": "training", "rank": 0, "world_size": 1}),
        (
            "weights.published",
            {
                "weight_version": "v2",
                "digest": DIGEST,
                "tensor_count": 2,
                "stamp_rule": "after_step",
                "adapters": [{"name": "lora", "digest": DIGEST}],
                "skipped": [],
                "tensors": [{"name": "w", "digest": DIGEST}],
                "path": "/w",
                "file_digest": DIGEST,
            },
        ),
        (
            "batch.layout",
            {
                "layout_id": "l0",
                "micro_batch": 1,
                "global_batch": 2,
                "sample_order": ["s0"],
                "offsets": [0, 7],
                "sequence_lengths": [7],
                "padding_side": "none",
                "packing": True,
                "active_density": 0.5,
                "decisions": [{"kept": True, "reason": "ok", "sample_id": "s0"}],
            },
        ),
        (
            "logprobs",
            {
                "sample_id": "s0",
                "source": "training",
                "contract_id": DIGEST,
                "values": [-0.5, -0.25, -0.0],
                "start": 0,
                "weight_version": "v1",
                "pass_id": "epoch-0",
                "shard": shard,
                "partials": three,
            },
        ),
    ]


def _replays() -> list[Listed]:
    """What a replay records."""
    ids = {"replay_id": "rp", "case_id": DIGEST, "arm": "both_native"}
    return [
        (
            "replay.planned",
            {
                "replay_id": "rp",
                "arms": ["both_native"],
                "samples": 1,
                "selection": {"where": "1"},
                "scorer": {"name": "reference"},
                "weights": [{"version": "v1"}],
                "tolerance_version": "1",
            },
        ),
        ("case.attempted", {**ids, "status": "completed", "request": {"x": 1}, "reason": "ok", "elapsed_ms": 1.5}),
        (
            "arm.scored",
            {
                **ids,
                "applied": True,
                "tokens": 7,
                "samples": 1,
                "groups": 1,
                "metrics": {"mean": 0.125},
                "reason": "ok",
            },
        ),
        (
            "gate.checked",
            {"replay_id": "rp", "gate": "values", "status": "unknown", "reason": "none", "evidence": {"n": 0}},
        ),
    ]


def _endings() -> list[Listed]:
    """What an audit finds, what a report and a shipper state, and how the training writer ends."""
    return [
        (
            "finding.raised",
            {
                "finding_id": "values.nan",
                "severity": "error",
                "where": {"sample_id": "s0"},
                "evidence": {"count": 2},
                "next_step": "look",
                "subject": "audit",
            },
        ),
        (
            "verdict.reached",
            {
                "verdict": "fail",
                "subject": "audit",
                "decision": "values",
                "reason": "NaN",
                "exit_code": 1,
                "evidence": {"count": 2},
                "tolerance_version": "1",
            },
        ),
        ("report.written", {"digest": DIGEST, "bytes": 10, "subject": "audit", "name": "r.html"}),
        ("gap", {"kind": "bulk", "first": 11, "last": 12, "reason": "budget", "bytes": 99, "event_type": "logprobs"}),
        ("writer.lost", {"writer": DEAD, "reason": "its process is dead", "last_seq": 1, "bytes_left": 20}),
        ("writer.closed", {"reason": "done"}),
    ]


def training_events() -> list[Listed]:
    """What the training side, the audit and the replay record."""
    return _scores() + _replays() + _endings()


def _numbered(writer_id: str, listed: list[Listed], skip: int = 0) -> list[Record]:
    out, seq = [], 0
    for i, (name, fields) in enumerate(listed):
        seq += skip if name == "gap" else 0
        wall = START_NS + i * 1_000_000
        out.append(event(RUN, writer_id, seq, name, wall_ns=wall, mono_ns=i * 1000, **{**_SHARED, **fields}))
        seq += 1
    return out


def of_tomorrow() -> list[Record]:
    """Events of a newer writer: an unknown type, an unknown field, unknown arrays of every dtype."""
    from rlk_ledger_schemas.arrays import ITEMSIZE

    arrays = {f"new.{dtype}": Array(dtype, bytes(range(1, 1 + 3 * size))) for dtype, size in ITEMSIZE.items()}
    arrays["new_uint8"] = Array("uint8", b"")
    arrays["values"] = ODD
    fields = {"schema_version": 2, "run_id": RUN, "writer_id": DEAD, "wall_ns": START_NS, "mono_ns": 0}
    strange = {**fields, "type": "of.tomorrow", "seq": 0, "novel": {"deep": [1, None, True]}, "step": "not a number"}
    known = {**fields, "type": "writer.closed", "seq": 1, "reason": "x", "novel": 2**60}
    return [make_record(encode(strange), arrays), make_record(encode(known), {})]


def make(folder: Path) -> None:
    """Writes golden-1/ and golden-1.json into `folder`."""
    store = open_store(str(folder / "golden-1"))
    info = LedgerInfo(
        format=1,
        hash="sha256",
        ledger_id=LEDGER_ID,
        required_features=(),
        created_us=START_NS // 1000,
        put_if_absent="honoured",
    )
    store.create(layout.LEDGER, encode_object(info))
    run = RunInfo(
        format=1,
        ledger_id="",
        run_id=RUN,
        roles={"rollout": 1, "training": 1},
        mode={"fast": "off", "consistency": "audit"},
        redaction="none",
        created_us=START_NS // 1000,
        lineage={"run": "before", "step": 2},
    )
    contact = meet(store, run)
    rollout, training, tomorrow = (
        _numbered(ROLLOUT, rollout_events()),
        _numbered(TRAINING, training_events(), 2),
        of_tomorrow(),
    )
    first = Chain(store, contact, SHIPPERS[0], lambda: START_NS // 1000)
    first.publish(first.draft(rollout[:6]))
    first.publish(first.draft(rollout[6:] + training[:4]))
    second = Chain(store, contact, SHIPPERS[1], lambda: START_NS // 1000 + 1)
    second.publish(second.draft(training[3:] + tomorrow[:1]))
    second.publish(second.draft(tomorrow[1:], {DEAD: Ending(20, 1)}))
    text = json.dumps(twin(folder / "golden-1"), indent=1, sort_keys=True, ensure_ascii=False)
    (folder / "golden-1.json").write_text(text + "\n")


def twin(root: Path) -> dict[str, Any]:
    """Everything a ledger holds, decoded, and the byte vectors of format 1."""
    ledger = open_ledger(str(root))
    run = ledger.run(RUN)
    events = sorted(run.records(), key=lambda r: (r.writer_id, r.seq))
    return {
        "ledger": json.loads((root / "ledger.json").read_bytes()),
        "run": json.loads((root / layout.run_json(RUN)).read_bytes()),
        "events": [_event(record) for record in events],
        "receipts": {
            path: json.loads((root / path).read_bytes())
            for path in (layout.receipt_path(RUN, r.shipper, r.n) for r in run.receipts)
        },
        "vectors": vectors(events[0]),
    }


def _event(record: Record) -> dict[str, Any]:
    return {
        "envelope": record.envelope.hex(),
        "fields": decode_envelope(record.envelope),
        "arrays": {name: {"dtype": a.dtype, "bytes": a.data.hex()} for name, a in sorted(record.arrays.items())},
        "leaf": record.leaf.hex(),
    }


def header() -> SpoolHeader:
    """The spool header of the byte vector."""
    return SpoolHeader(
        writer_id=ROLLOUT,
        run_id=RUN,
        ledger_url="s3://bucket/rl",
        file_number=2,
        first_seq=17,
        pid=4242,
        process_start="123456:4026531836",
        host="node-1",
        boot_id="00000000-0000-0000-0000-000000000000",
        roles={"rollout": 1},
        consistency="audit",
        opened_wall_us=START_NS // 1000,
    )


def frame(payload: bytes, offset: int) -> bytes:
    """A frame of file 2 of the rollout writer at `offset`."""
    crc = frame_crc(crc_seed(ROLLOUT, 2), offset, payload)
    return (struct.pack("<II", len(payload), crc) + payload).ljust(frame_size(len(payload)), b"\0")


def vectors(record: Record) -> dict[str, Any]:
    """Bytes of format 1 in hex: a payload, that payload as a frame at offset 4096, a spool header."""
    payload = encode_payload(record.envelope, record.arrays)
    arrays = {"b": Array("uint8", b"\1\2"), "a": Array("float32", struct.pack("<I", 0x7FC00001))}
    small = encode_payload(b"\x81\xa4type\xa1x", arrays)
    return {
        "payload": {"sha256": sha256(payload), "bytes": len(payload)},
        "small_payload": small.hex(),
        "small_frame": frame(small, 4096).hex(),
        "spool_header": encode_header(header()).hex(),
    }


if __name__ == "__main__":
    make(Path(sys.argv[1]))
