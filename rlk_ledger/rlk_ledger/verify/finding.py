"""What verify says: findings with a kind, a severity and a place, and the exit code they add up to."""

from typing import Literal

import msgspec

from rlk_ledger_schemas.findings import Exit, Severity, exit_code

# kind -> (severity, what it means). An `error` is a change or a corruption, a `gap` is something that is missing, an
# `info` is named and fine.
KINDS: dict[str, tuple[Severity, str]] = {
    "ledger.unreadable": ("error", "ledger.json is missing, does not parse or demands a newer reader"),
    "canary.changed": ("error", "an object of the put-if-absent probe is not what was written, or no such object"),
    "ledger.changed": ("error", "ledger.json is not the one a chain began under"),
    "run.unreadable": ("error", "run.json is missing or does not parse"),
    "run.changed": ("error", "run.json is not the one a chain began under, or belongs elsewhere"),
    "receipt.unreadable": ("error", "a receipt does not parse, or `self` does not match its content"),
    "receipt.missing": ("error", "a receipt that others follow, or that a checkpoint covers, is gone"),
    "receipt.misplaced": ("error", "a receipt stands where another belongs"),
    "receipt.unlinked": ("error", "a receipt does not follow the one before it: reordered, replaced or forged"),
    "receipt.replaced": ("error", "a receipt is not the one a checkpoint covers"),
    "receipt.uncovered": ("info", "receipts no checkpoint covers and no registered key signed: cut, nobody could tell"),
    "checkpoint.unreadable": ("error", "a checkpoint does not parse, or `self` does not match its content"),
    "checkpoint.missing": ("error", "a checkpoint that others follow, or that a copy kept elsewhere knows, is gone"),
    "checkpoint.misplaced": ("error", "a checkpoint stands where another belongs"),
    "checkpoint.unlinked": ("error", "a checkpoint does not follow the one before it"),
    "checkpoint.contradicts": ("error", "a checkpoint's tree is not that of the one before it and what it appends"),
    "checkpoint.changed": ("error", "a checkpoint is not the one a copy kept elsewhere knows"),
    "checkpoint.unsigned": ("gap", "none of the given keys signed a checkpoint of the run"),
    "anchor.unusable": ("gap", "the anchor holds nothing of the run, or something that is no checkpoint"),
    "signature.invalid": ("error", "a signature is not that of the key it claims"),
    "signature.missing": ("error", "a receipt without a signature in a chain that began with a key"),
    "signature.unchecked": ("info", "signatures nothing here can check"),
    "key.changed": ("info", "checkpoints after a signed one that bear another key's signature, or none"),
    "key.unknown": ("info", "checkpoints signed by a key that was not given"),
    "object.unknown": ("error", "an object among the receipts or checkpoints that is none"),
    "seal.unreadable": ("error", "the seal does not parse, or `self` does not match its content"),
    "seal.misplaced": ("error", "the seal of another run or ledger"),
    "seal.differs": ("error", "a seal says other than the checkpoint it stands on and the receipts under that"),
    "seal.unsigned": ("gap", "none of the given keys signed the seal"),
    "seal.incomplete": ("gap", "a run sealed while ranks were missing or writers open"),
    "seal.late": ("gap", "receipts after the seal, of writers it did not leave open and by no registered key"),
    "seal.added": ("info", "receipts after the seal, of writers it left open or by a registered key"),
    "index.changed": ("error", "an index is not what it is named after, or does not decode; readers pass it over"),
    "index.differs": ("error", "an index does not say what the receipts say; readers would be told wrong"),
    "segment.missing": ("error", "a segment that a receipt names is gone"),
    "segment.changed": ("error", "a segment's bytes are not those its receipt describes"),
    "segment.unreadable": ("error", "a segment does not decode"),
    "segment.contradicts": ("error", "a segment holds other events than its receipt says"),
    "leaf.differs": ("error", "an event's bytes do not give its leaf"),
    "projection.differs": ("error", "a column does not say what the event says"),
    "tombstone.contradicts": ("error", "a tombstone contradicts the receipt of a segment it names, or another one"),
    "hold.damaged": ("error", "an object among the holds that is no hold of the run, or was changed"),
    "fork": ("error", "one (writer, sequence number) holds two different events"),
    "seqs.missing": ("gap", "sequence numbers of a writer are in no segment and no gap event explains them"),
    "seqs.dropped": ("gap", "sequence numbers a gap event says were dropped"),
    "bytes.lost": ("gap", "bytes of a spool that were no event"),
    "rank.missing": ("gap", "a rank of the roster never reported"),
    "writer.killed": ("info", "a writer that died; what it had recorded was recovered"),
    "writer.open": ("info", "a writer that has not closed yet; what it adds later cannot be missed yet"),
    "run.redeclared": ("info", "a process declared the run otherwise than run.json, which the first one wrote"),
    "run.open": ("info", "ranks that have not reported while the run is still open"),
    "duplicates": ("info", "events committed twice with the same bytes; views show them once"),
    "segment.pruned": ("info", "segments deleted on purpose, as a tombstone says; their receipts stay"),
    "prune.unvouched": ("gap", "segments are gone, and what says they were pruned came after all that is believed"),
    "prune.unfinished": ("info", "segments that a tombstone names and that are still there: a prune was cut short"),
    "run.held": ("info", "a hold forbids pruning the run"),
    "store.overwrites": ("info", "the store ignored put-if-absent when the ledger or the run began"),
    "segment.garbage": ("info", "a segment no receipt names: it does not exist for readers"),
}


class Finding(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One finding: what, in which object, and where in it as far as that can be told.

    `first` and `last` are sequence numbers of `writer`, both included; `byte` and `end_byte` are offsets in the
    object, the end not included.
    """

    kind: str
    severity: Severity
    object: str
    text: str
    writer: str | None = None
    first: int | None = None
    last: int | None = None
    byte: int | None = None
    end_byte: int | None = None


class Covered(msgspec.Struct, frozen=True, kw_only=True):
    """How much of a run its newest checkpoint (of the given keys, where any are) covers.

    `receipts` are covered; `signed` more are not yet and bear the signature of a registered key; `uncovered` are the
    rest. `k` and `digest` are None without a checkpoint.
    """

    run_id: str
    k: int | None
    digest: str | None
    receipts: int
    signed: int
    uncovered: int


class VerifyResult(msgspec.Struct, frozen=True, kw_only=True):
    """Every finding, what was looked at, and the exit code: 0 intact, 1 tampered or corrupt, 3 incomplete.

    Segments, events and bytes are those the receipts name; of `pruned` segments only the receipt could be looked at.
    `copies` is how many checkpoints kept elsewhere they were compared with.
    """

    findings: tuple[Finding, ...]
    exit_code: Exit
    verdict: Literal["intact", "tampered", "incomplete"]
    deep: bool
    runs: int
    receipts: int
    segments: int
    events: int
    bytes: int
    pruned: int = 0
    checkpoints: tuple[Covered, ...] = ()
    copies: int = 0


def finding(kind: str, object_: str, text: str, **where: int | str | None) -> Finding:
    """A finding of `kind`; raises KeyError for a kind that is not in KINDS."""
    return Finding(kind=kind, severity=KINDS[kind][0], object=object_, text=text, **where)  # type: ignore[arg-type]


def result(
    findings: list[Finding],
    *,
    deep: bool,
    runs: int,
    receipts: int,
    segments: int,
    events: int,
    size: int,
    pruned: int,
    checkpoints: tuple[Covered, ...] = (),
    copies: int = 0,
) -> VerifyResult:
    """The result with its exit code; findings come worst first, then by object."""
    order = {"error": 0, "gap": 1, "info": 2}
    ordered = sorted(findings, key=lambda f: (order[f.severity], f.object, f.writer or "", f.first or 0, f.kind))
    code = exit_code(f.severity for f in ordered)
    verdict: Literal["intact", "tampered", "incomplete"]
    verdict = "tampered" if code == Exit.ERROR else "incomplete" if code == Exit.GAP else "intact"
    return VerifyResult(
        findings=tuple(ordered),
        exit_code=code,
        verdict=verdict,
        deep=deep,
        runs=runs,
        receipts=receipts,
        segments=segments,
        events=events,
        bytes=size,
        pruned=pruned,
        checkpoints=checkpoints,
        copies=copies,
    )
