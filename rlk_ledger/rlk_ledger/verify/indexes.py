"""Indexes against the receipts they consolidate. Nothing in a verdict rests on an index; answers of readers do."""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence

import msgspec

from rlk_ledger import layout
from rlk_ledger.index import Part, decode, lowbit
from rlk_ledger.receipts import Receipts, to_table
from rlk_ledger.store import Missing, Store
from rlk_ledger.verify.finding import Finding, finding
from rlk_ledger_schemas.errors import FormatError
from rlk_ledger_schemas.objects import Receipt

_AT_MOST = 20
"""Receipts listed for one index; the rest is counted."""
_Key = tuple[str, int]


def check_index(store: Store, run_id: str, receipts: Sequence[Receipt], listing: Iterable[str]) -> list[Finding]:
    """What is wrong with the run's indexes, given every receipt that can be read. Raises StoreError.

    `listing` has the names of the run's objects as they were listed before the receipts: an index made since may hold
    receipts that were not there yet.
    """
    said = {(r.shipper, r.n): msgspec.structs.replace(r, previous=None, signature=None) for r in receipts}
    found: list[Finding] = []
    for name in (name for name in listing if name.startswith("index/")):
        path = f"{layout.run_root(run_id)}/{name}"
        key = layout.parse_index(name)
        if key is None:
            found.append(finding("object.unknown", path, "it is no index"))
            continue
        try:
            data = store.read(path)
        except Missing:  # it may be deleted at any time
            continue
        if hashlib.sha256(data).hexdigest()[:16] != key[1]:
            found.append(finding("index.changed", path, "its bytes are not those it is named after"))
            continue
        try:
            part = decode(data, path)
        except FormatError as error:
            found.append(finding("index.changed", path, str(error).removeprefix(f"{path}: ")))
            continue
        found += _differences(path, run_id, key[0], part, said)
    return found


def _differences(path: str, run_id: str, k: int, part: Part, said: Mapping[_Key, Receipt]) -> Iterator[Finding]:
    info = part.info
    if (info.run_id, info.last, info.first) != (run_id, k, k + 1 - lowbit(k)):
        text = f"it says it is that of checkpoints {info.first}-{info.last} of run {info.run_id!r}"
        yield finding("index.differs", path, text)
    if {info.ledger_id} - {r.ledger_id for r in said.values()} and said:
        yield finding("index.differs", path, f"it is of ledger {info.ledger_id}")
        return
    absent = next(((s, n) for m in (info.before, info.after) for s, n in sorted(m.items()) if (s, n) not in said), None)
    if absent is not None:
        what = f"receipt {absent[1]} of shipper {absent[0]}"
        yield finding("index.differs", path, f"its marks name {what}, which is not there or cannot be read")
        return
    covered = [(s, n) for s, last in sorted(info.after.items()) for n in range(info.before.get(s, -1) + 1, last + 1)]
    rows = Receipts(part.table, info.ledger_id, info.run_id)
    if all(key in said for key in covered) and rows.table.equals(to_table([said[key] for key in covered])):
        return
    held = {(r.shipper, r.n): r for r in rows}
    wrong = sorted(key for key in {*covered, *held} if key not in held or held[key] != said.get(key))
    if len(held) != len(rows):
        yield finding("index.differs", path, f"{len(rows) - len(held)} of its rows repeat a receipt")
    yield from (_wrong(path, info.run_id, key, held, said, set(covered)) for key in wrong[:_AT_MOST])
    if len(wrong) > _AT_MOST:
        yield finding("index.differs", path, f"{len(wrong) - _AT_MOST} more receipts of it differ")
    if not wrong and len(held) == len(rows):
        yield finding("index.differs", path, "its columns do not say what the receipts say")


def _wrong(
    path: str, run_id: str, key: _Key, held: Mapping[_Key, Receipt], said: Mapping[_Key, Receipt], covered: set[_Key]
) -> Finding:
    receipt = layout.receipt_path(run_id, *key)
    if key not in held:
        text = f"it leaves out {receipt}, which it says it covers"
    elif key not in said:
        text = f"it holds {receipt}, which is not there or cannot be read"
    else:
        text = f"of {receipt} it says what the receipt does not say"
    return finding("index.differs", path, text)
