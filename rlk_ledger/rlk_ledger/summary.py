"""A run at a glance, from its receipts; a run in detail, with its writers and token counts."""

from typing import Any

import pyarrow.compute as pc

from rlk_ledger.chain import held_ranges
from rlk_ledger.holds import read_holds
from rlk_ledger.ledger import Ledger, Run
from rlk_ledger.seals import read_seal
from rlk_ledger.segments import read_segment
from rlk_ledger.spans import merged, total
from rlk_ledger.store import Missing


def overview(run: Run) -> dict[str, Any]:
    """Counts and states of one run; nothing but run.json, receipts, tombstones, holds and the seal is read."""
    writers, pruned, seal = writer_states(run), run.pruned(), read_seal(run.store, run.run_id)
    steps = [s for r in run.receipts for t in r.types for s in (t.min_step, t.max_step) if s is not None]
    own = [w for w in writers.values() if not w["shipper"]]
    return {
        "run_id": run.run_id,
        "roles": dict(sorted(run.info.roles.items())),
        "redaction": run.info.redaction,
        "created_us": run.info.created_us,
        "events": sum(w["events"] for w in writers.values()),
        "segments": len(run.receipts),
        "bytes": sum(r.segment.bytes for r in run.receipts),
        "first_step": min(steps, default=None),
        "last_step": max(steps, default=None),
        "writers": len(own),
        "open": sum(w["state"] == "open" for w in own),
        "killed": sum(w["state"] == "killed" for w in own),
        "dropped": sum(w["dropped"] for w in own),
        "lost_bytes": sum(w["lost_bytes"] for w in own),
        "pruned_segments": pruned.segments if pruned else 0,
        "pruned_events": pruned.events if pruned else 0,
        "holds": sum(state.stands for state in read_holds(run.store, run.run_id)),
        "sealed": seal and ("complete" if seal.complete else "incomplete"),
    }


def writer_states(run: Run) -> dict[str, dict[str, Any]]:
    """Writer id -> what the receipts say of it, in order of first appearance."""
    shippers = {receipt.shipper for receipt in run.receipts}
    out: dict[str, dict[str, Any]] = {}
    spans: dict[str, list[tuple[int, int]]] = {}
    for receipt in run.receipts:
        for writer in receipt.writers:
            state = out.setdefault(
                writer.writer_id,
                {
                    "writer_id": writer.writer_id,
                    "shipper": writer.writer_id in shippers,
                    "state": "open",
                    "dropped": 0,
                    "lost_bytes": 0,
                },
            )
            spans.setdefault(writer.writer_id, []).extend(held_ranges(writer))
            state["dropped"] += writer.gaps or 0
            state["lost_bytes"] += writer.lost_bytes or 0
            if writer.closed:
                state["state"] = "closed"
            elif writer.dead and state["state"] == "open":
                state["state"] = "killed"
    for writer_id, state in out.items():
        held = merged(spans[writer_id])
        state["events"] = total(held)
        state["last_seq"] = held[-1][1] if held else None
    return out


def detail(ledger: Ledger, run_id: str) -> dict[str, Any]:
    """The overview with every writer, every event type, and response tokens recorded and active."""
    run = ledger.run(run_id)
    writers, pruned = writer_states(run), run.pruned()
    for _, _, fields, _ in ledger.read_events(run_id, {"writer.opened"}):
        state = writers.get(fields["writer_id"])
        if state is not None:
            engine = fields.get("engine") or {}
            state.update(
                role=fields.get("role"), rank=fields.get("rank"), host=fields.get("host"), pid=fields.get("pid")
            )
            state.update(engine=engine.get("name") if isinstance(engine, dict) else None)
    types: dict[str, dict[str, Any]] = {}
    for receipt in run.receipts:
        for item in receipt.types:
            entry = types.setdefault(item.type, {"type": item.type, "count": 0, "first_step": None, "last_step": None})
            entry["count"] += item.count
            entry["first_step"] = min((s for s in (entry["first_step"], item.min_step) if s is not None), default=None)
            entry["last_step"] = max((s for s in (entry["last_step"], item.max_step) if s is not None), default=None)
    return {
        **overview(run),
        "ledger": ledger.url,
        "ledger_id": ledger.info.ledger_id,
        "mode": run.info.mode,
        "lineage": run.info.lineage,
        "writer_list": list(writers.values()),
        "types": [types[name] for name in sorted(types)],
        "pruned": pruned and {**pruned._asdict(), "text": pruned.text},
        **_tokens(run),
    }


def _tokens(run: Run) -> dict[str, int]:
    """Response tokens and how many of them the loss mask keeps, as recorded (duplicates of a hand-over included)."""
    tokens = active = 0
    for segment in run.segments({"rollout.sample"}):
        try:
            table = read_segment(run.store.read(segment.path), {"rollout.sample"})
        except Missing:
            run.outliving(segment)  # or it would be missing, not pruned
            continue
        masks = table["loss_mask__uint8"]
        tokens += pc.sum(pc.list_value_length(masks)).as_py() or 0
        active += pc.sum(pc.list_flatten(masks)).as_py() or 0
    return {"tokens": tokens, "active_tokens": active}
