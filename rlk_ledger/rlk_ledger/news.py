"""What a run holds beyond its last checkpoint: chains followed by name from their marks on, each receipt checked.

Following costs a request a receipt and one a chain, to see that nothing follows. A listing of every receipt tells the
chains that have news, and is used where it takes fewer requests than asking every chain.
"""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from rlk_ledger import layout
from rlk_ledger.store import Missing, Store
from rlk_ledger_schemas.errors import FormatError
from rlk_ledger_schemas.fingerprints import sha256
from rlk_ledger_schemas.merkle import leaf as leaf_hash
from rlk_ledger_schemas.objects import decode_receipt

_CHAINS = 8
_READERS = 16
_LISTED = 1000
"""Objects in one page of a listing."""


class Arrival(NamedTuple):
    """A receipt nothing covers yet: its place and its leaf hash."""

    shipper: str
    n: int
    leaf: bytes


class News:
    """Looks for a run's uncovered receipts. `damaged` collects what is wrong with receipts that no chain goes past."""

    def __init__(self, store: Store, run_id: str, ledger_id: str) -> None:
        self.store = store
        self.run_id = run_id
        self.ledger_id = ledger_id
        self.damaged: list[str] = []

    def chains(self, marks: Mapping[str, int]) -> list[str]:
        """The shippers that may have receipts after their marks, sorted."""
        folder = f"{layout.run_root(self.run_id)}/receipt"
        if sum(mark + 1 for mark in marks.values()) // _LISTED > len(marks):
            return sorted({name for name in self.store.children(folder) if layout.is_shipper(name)} | set(marks))
        prefix = layout.run_root(self.run_id) + "/"
        keys = (layout.parse_receipt(entry.path.removeprefix(prefix)) for entry in self.store.list(folder))
        return sorted({key[0] for key in keys if key is not None and key[1] > marks.get(key[0], -1)})

    def follow(self, chains: Sequence[str], marks: Mapping[str, int], most: int) -> list[list[Arrival]]:
        """For each chain its receipts after its mark, in order, at most `most`; one that is missing ends a chain."""
        self.damaged = []
        with ThreadPoolExecutor(_CHAINS) as pool, ThreadPoolExecutor(_READERS) as readers:
            return list(pool.map(lambda s: list(self._follow(s, marks.get(s, -1) + 1, most, readers)), chains))

    def _follow(self, shipper: str, first: int, most: int, readers: ThreadPoolExecutor) -> Iterator[Arrival]:
        previous: str | None = None
        for n, data in self._from(shipper, first, most, readers):
            if n > 0 and previous is None:  # the link to the receipt at the mark is part of the chain
                previous = self._digest(shipper, n - 1)
            wrong = self._wrong(data, shipper, n, previous)
            if wrong is not None:
                again = self._read(shipper, n)  # a reply that was cut is no damage
                if again is None or self._wrong(again, shipper, n, previous) is not None:
                    self.damaged.append(wrong)
                    return
                data = again
            previous = sha256(data)
            yield Arrival(shipper, n, leaf_hash(data))

    def _from(self, shipper: str, first: int, most: int, readers: ThreadPoolExecutor) -> Iterator[tuple[int, bytes]]:
        """(n, bytes) from `first` on until one is not there; asks for ever more at once while all of them are."""
        n, end = first, first + most
        for width in itertools.chain((1, 2, 4, 8), itertools.repeat(16)):
            numbers = range(n, min(n + width, end))
            for number, data in zip(numbers, readers.map(lambda m: self._read(shipper, m), numbers), strict=True):
                if data is None:
                    return
                yield number, data
            n = numbers.stop
            if n >= end:
                return

    def _read(self, shipper: str, n: int) -> bytes | None:
        try:
            return self.store.read(layout.receipt_path(self.run_id, shipper, n))
        except Missing:
            return None

    def _digest(self, shipper: str, n: int) -> str:
        data = self._read(shipper, n)
        return "missing" if data is None else sha256(data)

    def _wrong(self, data: bytes, shipper: str, n: int, previous: str | None) -> str | None:
        """What is wrong with a receipt, None when it stands where it belongs and follows `previous`."""
        path = layout.receipt_path(self.run_id, shipper, n)
        try:
            receipt = decode_receipt(data, path)
        except FormatError as error:
            return str(error).rstrip(".")
        place = (self.ledger_id, self.run_id, shipper, n)
        if (receipt.ledger_id, receipt.run_id, receipt.shipper, receipt.n) != place:
            return f"{path} is receipt {receipt.n} of shipper {receipt.shipper} of run {receipt.run_id!r}"
        if receipt.previous != previous:
            return f"{path} does not follow the receipt before it"
        return None


def unfinished(chains: Iterable[str], found: Iterable[Sequence[Arrival]], most: int) -> list[str]:
    """The chains that may hold more than was taken of them."""
    return [shipper for shipper, arrivals in zip(chains, found, strict=True) if len(arrivals) >= most]
