"""A run at a glance, from its receipts; a run in detail, with its writers and token counts."""

from typing import Any

import pyarrow.compute as pc

from rlk_ledger.holds import read_holds
from rlk_ledger.ledger import Ledger, Run
from rlk_ledger.seals import read_seal
from rlk_ledger.segments import read_segment
from rlk_ledger.spans import total
from rlk_ledger.store import Missing


def overview(run: Run) -> dict[str, Any]:
    """Counts and states of one run; nothing but run.json, receipts, tombstones, holds and the seal is read."""
    writers, pruned, seal = writer_states(run), run.pruned(), read_seal(run.store, run.run_id)
    steps = [s for t in run.held.types.values() for s in (t.first_step, t.last_step) if s is not None]
    own = [w for w in writers.values() if not w["shipper"]]
    return {
        "run_id": run.run_id,
        "roles": dict(sorted(run.info.roles.items())),
        "redaction": run.info.redaction,
        "created_us": run.info.created_us,
        "events": sum(w["events"] for w in writers.values()),
        "segments": len(run.held),
        "bytes": run.held.total("bytes"),
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
    return {
        writer_id: {
            "writer_id": writer_id,
            "shipper": writer_id in run.held.marks,
            "state": "closed" if held.closed else "killed" if held.dead else "open",
            "dropped": held.gaps,
            "lost_bytes": held.lost_bytes,
            "events": total(held.ranges),
            "last_seq": held.ranges[-1][1] if held.ranges else None,
        }
        for writer_id, held in run.held.writers.items()
    }


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
    types = [
        {"type": name, "count": said.events, "first_step": said.first_step, "last_step": said.last_step}
        for name, said in run.held.types.items()
    ]
    return {
        **overview(run),
        "ledger": ledger.url,
        "ledger_id": ledger.info.ledger_id,
        "mode": run.info.mode,
        "lineage": run.info.lineage,
        "writer_list": list(writers.values()),
        "types": types,
        "pruned": pruned and {**pruned._asdict(), "text": pruned.text},
        **_tokens(run),
    }


def _tokens(run: Run) -> dict[str, int]:
    """Response tokens and how many of them the loss mask keeps, as recorded (duplicates of a hand-over included)."""
    tokens = active = 0
    for segment in run.segments({"rollout.sample"}):
        try:
            table = read_segment(run.intact(segment), {"rollout.sample"})
        except Missing:
            run.outliving(segment)  # or it would be missing, not pruned
            continue
        masks = table["loss_mask__uint8"]
        tokens += pc.sum(pc.list_value_length(masks)).as_py() or 0
        active += pc.sum(pc.list_flatten(masks)).as_py() or 0
    return {"tokens": tokens, "active_tokens": active}
