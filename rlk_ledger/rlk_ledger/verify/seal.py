"""A run's seal against the checkpoint it stands on, the receipts under that, and what came after it."""

from collections.abc import Iterator, Sequence

from rlk_ledger import layout, signing
from rlk_ledger.checkpoints import read_checkpoint
from rlk_ledger.ledger import Run
from rlk_ledger.seals import Census, covered, openings, sealed_checkpoint, take_census
from rlk_ledger.store import Missing, Store
from rlk_ledger.tombstones import TYPE
from rlk_ledger.verify.chains import Chains
from rlk_ledger.verify.checkpoints import Coverage, registered_by
from rlk_ledger.verify.finding import Finding, finding
from rlk_ledger_schemas.checkpoints import Checkpoint
from rlk_ledger_schemas.errors import FormatError, LedgerError
from rlk_ledger_schemas.notes import decode_base64
from rlk_ledger_schemas.objects import LedgerInfo, Receipt
from rlk_ledger_schemas.seals import Seal, decode_seal, seal_message

_STATEMENTS = frozenset({"writer.opened", "writer.lost"})
"""What a shipper says in its own name."""
_TOMBSTONE = frozenset({"run.opened", "writer.opened", "segments.pruned", "writer.closed"})
"""What `prune` writes, whose belief is judged where tombstones are."""


def check_seal(
    store: Store,
    run_id: str,
    ledger: LedgerInfo | None,
    chains: Chains,
    coverage: Coverage,
    keys: Sequence[bytes] = (),
) -> list[Finding]:
    """What is wrong with the seal, what it left open, and what came after it; nothing for a run without one."""
    path = layout.seal_path(run_id)
    try:
        data = store.read(path)
        seal = decode_seal(data, path)
    except Missing:
        return []
    except FormatError as error:
        return [finding("seal.unreadable", path, str(error).removeprefix(f"{path}: "))]
    if seal.run_id != run_id or (ledger is not None and seal.ledger_id != ledger.ledger_id):
        return [finding("seal.misplaced", path, f"it is the seal of run {seal.run_id!r} of ledger {seal.ledger_id}")]
    found = [*_check_signature(path, seal, keys), *_check_unfinished(path, seal, chains.receipts)]
    checkpoint, wrong = _stands_on(store, run_id, path, seal)
    if wrong is not None and (wrong.kind, wrong.object) not in {(f.kind, f.object) for f in coverage.findings}:
        found.append(wrong)
    if checkpoint is None:
        return found
    found += _check_census(store, run_id, path, seal, chains, checkpoint)
    return found + list(_check_late(run_id, seal, chains, checkpoint, coverage))


def _check_signature(path: str, seal: Seal, keys: Sequence[bytes]) -> Iterator[Finding]:
    if seal.public_key is None:
        if seal.signature is not None:
            yield finding("signature.invalid", path, "it bears a signature and names no key")
        if keys:
            yield finding("seal.unsigned", path, "none of the keys that were given signed it")
        return
    try:
        key, signature = decode_base64(seal.public_key), decode_base64(seal.signature or "")
    except FormatError:
        key, signature = b"", b""
    if not signing.available():
        yield finding("signature.unchecked", path, f"it is signed, and that was not checked: {signing.INSTALL}")
    elif not signing.check(key, signature, seal_message(seal)):
        yield finding("signature.invalid", path, "it bears no signature of the key it names")
    elif keys and key not in keys:
        yield finding("seal.unsigned", path, f"it is signed by another key than was given: {seal.public_key}")


def _stands_on(store: Store, run_id: str, path: str, seal: Seal) -> tuple[Checkpoint | None, Finding | None]:
    """The checkpoint the seal names, and how it is another than the seal says; neither where it is damaged."""
    where = layout.checkpoint_path(run_id, seal.checkpoint.k)
    try:
        there = read_checkpoint(store, run_id, seal.checkpoint.k)
    except Missing:
        return None, finding("checkpoint.missing", where, f"it is gone, and {path} stands on it")
    except LedgerError:  # said where it was found
        return None, None
    if sealed_checkpoint(there) != seal.checkpoint:
        text = f"{where} is another than the one on which it stands: {there.size} receipts, {there.digest}"
        return None, finding("seal.differs", path, text)
    return there, None


def _check_census(
    store: Store, run_id: str, path: str, seal: Seal, chains: Chains, checkpoint: Checkpoint
) -> Iterator[Finding]:
    """Roster, open writers and missing ranks, taken again from what the checkpoint covers, if all of it can be read."""
    receipts = covered(chains.receipts, checkpoint)
    if chains.info is None or len(receipts) != checkpoint.size:
        return
    try:
        census = take_census(chains.info, receipts, openings(Run(store, run_id), receipts))
    except LedgerError:  # a damaged segment is a finding of its own
        return
    if census != Census(seal.roster, seal.open, seal.missing):
        what = "roster" if census.roster != seal.roster else "open writers" if census.open != seal.open else "ranks"
        yield finding("seal.differs", path, f"its {what} are not those of the receipts under its checkpoint")


def _check_unfinished(path: str, seal: Seal, receipts: Sequence[Receipt]) -> Iterator[Finding]:
    """Ranks that were missing when it was sealed, and writers that were open then and have not ended since."""
    ended = {w.writer_id for receipt in receipts for w in receipt.writers if w.closed or w.dead}
    still = tuple(writer for writer in seal.open if writer not in ended)
    if still or any(seal.missing.values()):
        text = f"the run was sealed unfinished: {Census(seal.roster, still, seal.missing).text}"
        yield finding("seal.incomplete", path, text)


def _check_late(
    run_id: str, seal: Seal, chains: Chains, checkpoint: Checkpoint, coverage: Coverage
) -> Iterator[Finding]:
    """Receipts that came after the seal: expected, by a registered key, or of nobody the seal knows."""
    sealed = checkpoint.info.marks
    registered = coverage.registered | (registered_by(sealed, chains) if coverage.newest is None else frozenset())
    for receipt in chains.receipts:
        if receipt.n <= sealed.get(receipt.shipper, -1):
            continue
        path = layout.receipt_path(run_id, receipt.shipper, receipt.n)
        strangers = _strangers(receipt, seal)
        if not strangers:
            yield finding("seal.added", path, "it came after the seal, of writers that were open then")
        elif TYPE in (types := {t.type for t in receipt.types}) and types <= _TOMBSTONE:
            yield finding("seal.added", path, "it came after the seal, and holds a tombstone")
        elif (receipt.shipper, receipt.n) in chains.signed and chains.keys[receipt.shipper] in registered:
            yield finding("seal.added", path, "it came after the seal, signed by a registered key")
        else:
            whose = f"{len(strangers)} writers the seal does not know as open"
            text = f"it came after the seal, of {whose}, and bears no registered signature"
            yield finding("seal.late", path, text, writer=strangers[0])


def _strangers(receipt: Receipt, seal: Seal) -> list[str]:
    """Writers of a receipt that were not open when the run was sealed; a shipper may always say what it found."""
    others = {w.writer_id for w in receipt.writers} - {receipt.shipper}
    if not others and not {t.type for t in receipt.types} <= _STATEMENTS:
        return [receipt.shipper]
    return sorted(others - set(seal.open))
