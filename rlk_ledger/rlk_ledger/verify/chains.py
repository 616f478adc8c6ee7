"""The objects of one run against each other: run.json, the chains of receipts, and what else lies about."""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from rlk_ledger import layout, signing
from rlk_ledger.spans import merged, subtract
from rlk_ledger.store import Missing, Store
from rlk_ledger.verify.finding import Finding, finding
from rlk_ledger_schemas.errors import FormatError
from rlk_ledger_schemas.fingerprints import sha256
from rlk_ledger_schemas.merkle import leaf as leaf_hash
from rlk_ledger_schemas.notes import decode_base64
from rlk_ledger_schemas.objects import LedgerInfo, Receipt, RunInfo, decode_receipt, decode_run

_READERS = 8
_HELD = 1024

Place = tuple[str, int]
"""Where a receipt stands: shipper and n."""


class Chains(NamedTuple):
    """The readable receipts of a run by shipper and number, run.json where it is readable, and what was found.

    `leaves` has the leaf hash of every receipt there is, over the very bytes that were checked; `keys` the public key
    each chain began with; `signed` the places whose signature by that key was checked and holds; `listing` every
    object's (path relative to the run, size).
    """

    receipts: tuple[Receipt, ...]
    info: RunInfo | None
    findings: list[Finding]
    leaves: dict[Place, bytes]
    keys: dict[str, bytes]
    signed: set[Place]
    listing: list[tuple[str, int]]


def check_chains(store: Store, run_id: str, ledger: LedgerInfo | None, ledger_bytes: bytes) -> Chains:
    """Reads and links every receipt of the run. Raises StoreError."""
    findings: list[Finding] = []
    info, run_bytes = _run_info(store, run_id, ledger, findings)
    listing = _listing(store, run_id)
    out = Chains((), info, findings, {}, {}, set(), listing)
    numbers, segments = _sort(out, run_id)
    receipts: list[Receipt] = []
    reads = _reads(store, [layout.receipt_path(run_id, s, n) for s in sorted(numbers) for n in sorted(numbers[s])])
    for shipper in sorted(numbers):
        receipts += _Chain(run_id, shipper, numbers[shipper], out).check(reads)
    _check_origins(receipts, run_id, ledger, ledger_bytes, run_bytes, findings)
    _check_signable(out, run_id)
    named = {receipt.segment.name for receipt in receipts}
    for name, size in segments:
        if name not in named:
            path = layout.segment_path(run_id, name)
            findings.append(finding("segment.garbage", path, f"no receipt names it ({size} bytes); readers ignore it"))
    return out._replace(receipts=tuple(receipts))


def _reads(store: Store, paths: Sequence[str]) -> Iterator[bytes]:
    """The objects at `paths` in order, many asked for at once, few held."""
    with ThreadPoolExecutor(_READERS) as pool:
        for start in range(0, len(paths), _HELD):
            yield from pool.map(store.read, paths[start : start + _HELD])


def _check_signable(chains: Chains, run_id: str) -> None:
    """Says once when signatures are there and nothing here can check them."""
    if chains.keys and not signing.available():
        text = f"receipts of {len(chains.keys)} chains are signed and were not checked: {signing.INSTALL}"
        chains.findings.append(finding("signature.unchecked", layout.run_root(run_id), text))


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


def _listing(store: Store, run_id: str) -> list[tuple[str, int]]:
    """(path relative to the run, size) of every object; receipts are listed last.

    A listing is no snapshot: what a checkpoint, an index or a segment speaks of was there before it, so it is seen.
    """
    prefix = layout.run_root(run_id) + "/"
    others = [(e.path.removeprefix(prefix), e.size) for e in store.list(layout.run_root(run_id))]
    receipts = [(e.path.removeprefix(prefix), e.size) for e in store.list(f"{layout.run_root(run_id)}/receipt")]
    return [(name, size) for name, size in others if not name.startswith("receipt/")] + receipts


def _sort(chains: Chains, run_id: str) -> tuple[dict[str, set[int]], list[tuple[str, int]]]:
    """Receipt numbers by shipper, and (name, size) of every segment; names that can be neither are findings."""
    numbers: dict[str, set[int]] = {}
    segments = []
    for name, size in chains.listing:
        key = layout.parse_receipt(name)
        if key is not None:
            numbers.setdefault(key[0], set()).add(key[1])
        elif layout.parse_segment(name) is not None:
            segments.append((name, size))
        elif name.startswith(("receipt/", "segment/")):
            path = f"{layout.run_root(run_id)}/{name}"
            chains.findings.append(finding("object.unknown", path, "it is no receipt and no segment"))
    return numbers, segments


class _Chain:
    """One chain under examination; what is found goes into `out`."""

    def __init__(self, run_id: str, shipper: str, numbers: set[int], out: Chains) -> None:
        self.run_id = run_id
        self.shipper = shipper
        self.numbers = numbers
        self.out = out

    def _path(self, n: int) -> str:
        return layout.receipt_path(self.run_id, self.shipper, n)

    def _found(self, kind: str, n: int, text: str, byte: int | None = None) -> None:
        self.out.findings.append(finding(kind, self._path(n), text, byte=byte))

    def check(self, reads: Iterator[bytes]) -> list[Receipt]:
        """The readable receipts, each checked against its place and the one before it; `reads` has their bytes next."""
        self._check_gaps()
        receipts = []
        previous: str | None = None
        linked = True  # whether `previous` is known
        for n in sorted(self.numbers):
            data = next(reads)
            self.out.leaves[self.shipper, n] = leaf_hash(data)
            linked = linked and (n == 0 or n - 1 in self.numbers)
            receipt = self._decoded(n, data)
            if receipt is not None and self._stands(n, receipt):
                if linked and receipt.previous != previous:
                    text = f"it follows {receipt.previous}, the receipt before it is {previous}"
                    self._found("receipt.unlinked", n, text)
                if layout.parse_segment(receipt.segment.name) != (self.shipper, n, receipt.root[7:23]):
                    self._found("receipt.misplaced", n, f"it names the segment {receipt.segment.name!r}")
                else:
                    receipts.append(receipt)
                self._check_signature(n, data, receipt)
            previous, linked = sha256(data), receipt is not None
        return receipts

    def _check_gaps(self) -> None:
        last = max(self.numbers)
        for first, until in subtract([(0, last)], merged((n, n) for n in self.numbers)):
            which = (
                f"receipt {first} of {last + 1} is" if first == until else f"receipts {first}-{until} of {last + 1} are"
            )
            self._found("receipt.missing", first, f"{which} gone, and with that what the segments held")

    def _decoded(self, n: int, data: bytes) -> Receipt | None:
        path = self._path(n)
        try:
            return decode_receipt(data, path)
        except FormatError as error:
            text = str(error).removeprefix(f"{path}: ")
            self._found("receipt.unreadable", n, text, byte=_first_odd_byte(data))
            return None

    def _stands(self, n: int, receipt: Receipt) -> bool:
        if (receipt.run_id, receipt.shipper, receipt.n) == (self.run_id, self.shipper, n):
            return True
        text = f"it is receipt {receipt.n} of shipper {receipt.shipper} of run {receipt.run_id!r}"
        self._found("receipt.misplaced", n, text)
        return False

    def _check_signature(self, n: int, data: bytes, receipt: Receipt) -> None:
        """A chain that began with a key bears its signature to the end; one that began without bears none."""
        if n == 0 and receipt.public_key is not None:
            try:
                self.out.keys[self.shipper] = decode_base64(receipt.public_key)
            except FormatError:
                self._found("signature.invalid", n, "its public key is no base64")
                return
        key = self.out.keys.get(self.shipper)
        if key is None:
            return
        if receipt.signature is None:
            self._found("signature.missing", n, "its chain began with a key, and it bears no signature")
        elif signing.available():
            if signing.receipt_signed_by(data, receipt, key):
                self.out.signed.add((self.shipper, n))
            else:
                self._found("signature.invalid", n, "its signature is not that of the key its chain began with")


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
