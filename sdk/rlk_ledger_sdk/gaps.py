"""Sequence numbers that were consumed and hold nothing, until a gap event states them."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlk_ledger_sdk.spool import SpoolWriter

Encoded = Callable[[str, dict[str, Any]], bytes]
"""The payload of an event of this type with these fields, under the next sequence number of the spool."""
_ORDER = ("audit", "bulk", "internal", "rejected")


class Losses:
    """One range of lost sequence numbers not stated yet. Owned by the recorder's critical section.

    `add` comes before the sequence number is consumed and `written_as` before the gap event is put, so that after an
    exception between any two of these steps `settle` can tell what happened from the next sequence number alone.
    `kept` is the gap event as it will be put, with its number: whatever states these losses states the same bytes.
    """

    def __init__(self) -> None:
        self.total = 0
        self._range: tuple[int, int] | None = None
        self._counts: dict[str, int] = {}
        self._bytes = 0
        self._reason = ""
        self._event_type: str | None = None
        self._written_as = -1
        self.kept: tuple[int, bytes] | None = None

    def __bool__(self) -> bool:
        return self._range is not None

    @property
    def due(self) -> bool:
        """Whether to state the range now: at the 1st, 2nd, 4th, 8th ... loss, so that a long outage stays small."""
        return self.total & (self.total - 1) == 0

    def add(self, seq: int, kind: str, nbytes: int, reason: str, event_type: str | None) -> None:
        """Notes that `seq` is about to be consumed by an event that is not stored."""
        self.total += 1
        self._counts[kind] = self._counts.get(kind, 0) + 1
        self._bytes += nbytes
        self._reason = reason
        self._event_type = event_type
        self._written_as = -1
        self._range = (seq if self._range is None else self._range[0], seq)

    def written_as(self, seq: int) -> None:
        """Notes that the gap event is about to be put as sequence number `seq`."""
        self._written_as = seq

    def fields(self) -> dict[str, Any]:
        """The gap event that states the range."""
        assert self._range is not None
        kinds = sorted(self._counts, key=_ORDER.index)
        counted = ", ".join(f"{self._counts[kind]} {kind}" for kind in kinds)
        many = sum(self._counts.values()) > 1
        fields = {
            "kind": kinds[0],
            "first": self._range[0],
            "last": self._range[1],
            "reason": f"{self._reason} ({counted})" if many else self._reason,
            "event_type": None if many else self._event_type,
            "bytes": self._bytes or None,
        }
        return {name: value for name, value in fields.items() if value is not None}

    def event(self, spool: "SpoolWriter", encoded: Encoded) -> bytes:
        """The payload of the gap event as it will be put, kept where a kill leaves it."""
        seq, kept = spool.at[1], self.kept
        if kept is None or kept[0] != seq:
            kept = (seq, encoded("gap", self.fields()))
            spool.keep(kept[1])
            self.kept = kept
        return kept[1]

    def state(self, spool: "SpoolWriter", encoded: Encoded, roll: bool) -> bool:
        """Puts the gap event, in the reserve if need be; False when it has to wait. Raises Full, when `roll`."""
        payload = self.event(spool, encoded)
        self.written_as(spool.at[1])
        if not spool.put_reserved(payload):
            if not roll:
                return False
            spool.put(payload)
        self.clear()
        spool.keep(b"")
        return True

    def clear(self) -> None:
        """Forgets the range: a gap event holds it now."""
        self._range = None
        self._counts = {}
        self._bytes = 0
        self._written_as = -1
        self.kept = None

    def settle(self, next_seq: int) -> None:
        """Makes the range agree with the next sequence number after an exception cut one of the steps short."""
        if self._range is None:
            return
        if 0 <= self._written_as < next_seq:
            self.clear()
        elif self._range[1] >= next_seq:
            first, last = self._range[0], next_seq - 1
            if last < first:
                self.clear()
            else:
                self._range = (first, last)
