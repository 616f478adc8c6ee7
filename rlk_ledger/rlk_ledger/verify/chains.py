"""The objects of one run against each other: run.json, the chains of receipts, and what else lies about."""

from typing import NamedTuple

from rlk_ledger import layout
from rlk_ledger.spans import merged, subtract
from rlk_ledger.store import Missing, Store
from rlk_ledger.verify.finding import Finding, finding
from rlk_ledger_schemas.errors import FormatError
from rlk_ledger_schemas.fingerprints import sha256
from rlk_ledger_schemas.objects import LedgerInfo, Receipt, RunInfo, decode_receipt, decode_run


class Chains(NamedTuple):
    """The readable receipts of a run by shipper and number, run.json where it is readable, and what was found."""

    receipts: tuple[Receipt, ...]
    info: RunInfo | None
    findings: list[Finding]


def check_chains(store: Store, run_id: str, ledger: LedgerInfo | None, ledger_bytes: bytes) -> Chains:
    """Reads and links every receipt of the run. Raises StoreError."""
    findings: list[Finding] = []
    info, run_bytes = _run_info(store, run_id, ledger, findings)
    chains, segments = _listing(store, run_id, findings)
    receipts: list[Receipt] = []
    for shipper in sorted(chains):
        receipts += _chain(store, run_id, shipper, chains[shipper], findings)
    _check_origins(receipts, run_id, ledger, ledger_bytes, run_bytes, findings)
    named = {receipt.segment.name for receipt in receipts}
    for name, size in segments:
        if name not in named:
            path = layout.segment_path(run_id, name)
            findings.append(finding("segment.garbage", path, f"no receipt names it ({size} bytes); readers ignore it"))
    return Chains(tuple(receipts), info, findings)


def _run_info(
    store: Store, run_id: str, ledger: LedgerInfo | None, findings: list[Finding]
) -> tuple[RunInfo | None, bytes]:
    path = layout.run_json(run_id)
    try:
        data = store.read(path)
        info = decode_run(data, path)
    except Missing:
        findings.append(finding("run.unreadable", path, "run.json is gone"))
        return None, b""
    except FormatError as error:
        findings.append(finding("run.unreadable", path, str(error)))
        return None, data
    if info.run_id != run_id or (ledger is not None and info.ledger_id != ledger.ledger_id):
        findings.append(finding("run.changed", path, f"it is of run {info.run_id!r} of ledger {info.ledger_id}"))
    return info, data


def _listing(store: Store, run_id: str, findings: list[Finding]) -> tuple[dict[str, set[int]], list[tuple[str, int]]]:
    """Receipt numbers by shipper, and (name, size) of every segment."""
    chains: dict[str, set[int]] = {}
    segments = []
    prefix = layout.run_root(run_id) + "/"
    for entry in store.list(layout.run_root(run_id)):
        name = entry.path.removeprefix(prefix)
        key = layout.parse_receipt(name)
        if key is not None:
            chains.setdefault(key[0], set()).add(key[1])
        elif layout.parse_segment(name) is not None:
            segments.append((name, entry.size))
        elif name.startswith(("receipt/", "segment/")):
            findings.append(finding("object.unknown", entry.path, "it is no receipt and no segment"))
    return chains, segments


def _chain(store: Store, run_id: str, shipper: str, numbers: set[int], findings: list[Finding]) -> list[Receipt]:
    """The readable receipts of one chain, each checked against its place and the one before it."""
    out = []
    previous: str | None = None
    linked = True  # whether `previous` is known
    last = max(numbers)
    for first, until in subtract([(0, last)], merged((n, n) for n in numbers)):
        gone = f"receipt {first} of {last + 1} is" if first == until else f"receipts {first}-{until} of {last + 1} are"
        text = f"{gone} gone, and with that what the segments held"
        findings.append(finding("receipt.missing", layout.receipt_path(run_id, shipper, first), text))
    for n in sorted(numbers):
        path = layout.receipt_path(run_id, shipper, n)
        linked = linked and (n == 0 or n - 1 in numbers)
        data = store.read(path)
        try:
            receipt = decode_receipt(data, path)
        except FormatError as error:
            text = str(error).removeprefix(f"{path}: ")
            findings.append(finding("receipt.unreadable", path, text, byte=_first_odd_byte(data)))
            linked = False
            continue
        if (receipt.run_id, receipt.shipper, receipt.n) != (run_id, shipper, n):
            text = f"it is receipt {receipt.n} of shipper {receipt.shipper} of run {receipt.run_id!r}"
            findings.append(finding("receipt.misplaced", path, text))
        else:
            if linked and receipt.previous != previous:
                text = f"it follows {receipt.previous}, the receipt before it is {previous}"
                findings.append(finding("receipt.unlinked", path, text))
            parsed = layout.parse_segment(receipt.segment.name)
            if parsed != (shipper, n, receipt.root[7:23]):
                findings.append(finding("receipt.misplaced", path, f"it names the segment {receipt.segment.name!r}"))
            else:
                out.append(receipt)
        previous, linked = sha256(data), True
    return out


def _first_odd_byte(data: bytes) -> int | None:
    """The first byte that cannot stand in a receipt (receipts are printable ASCII), or the end when it is cut."""
    for i, byte in enumerate(data):
        if not 0x20 <= byte < 0x7F:
            return i
    return len(data) if data[-1:] != b"}" else None


def _check_origins(
    receipts: list[Receipt],
    run_id: str,
    ledger: LedgerInfo | None,
    ledger_bytes: bytes,
    run_bytes: bytes,
    findings: list[Finding],
) -> None:
    """The first receipt of every chain pins ledger.json and run.json; every receipt names the ledger."""
    changed: dict[str, str] = {}
    for receipt in receipts:
        if receipt.n == 0:
            if receipt.ledger_json != sha256(ledger_bytes):
                changed.setdefault("ledger.changed", receipt.shipper)
            if receipt.run_json != sha256(run_bytes):
                changed.setdefault("run.changed", receipt.shipper)
        if ledger is not None and receipt.ledger_id != ledger.ledger_id:
            path = layout.receipt_path(run_id, receipt.shipper, receipt.n)
            findings.append(finding("receipt.misplaced", path, f"it belongs to ledger {receipt.ledger_id}"))
    for kind, shipper in changed.items():
        path = layout.LEDGER if kind == "ledger.changed" else layout.run_json(run_id)
        findings.append(finding(kind, path, f"the chain of shipper {shipper} began under other bytes"))
