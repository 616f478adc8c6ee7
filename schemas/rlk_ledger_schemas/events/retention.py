"""What was deleted on purpose, by whom and under which policy."""

from typing import ClassVar

import msgspec

from rlk_ledger_schemas.events.base import Count, Digest, Event, Free, Name, register

Envelope = bytes


class PrunedSegment(msgspec.Struct, frozen=True, omit_defaults=True):
    """A segment that is to be deleted, as its receipt describes it, and what of it outlives it.

    `statements` are envelopes, verbatim, of events without arrays that speak of the run and not of a sample.
    """

    name: Name
    sha256: Digest
    rows: Count
    bytes: Count
    statements: tuple[Envelope, ...] = ()


@register
class SegmentsPruned(Event, frozen=True, kw_only=True):
    """A tombstone, committed before the first of its segments is deleted.

    `repeated` lists (writer id, first, last) of sequence numbers that another segment held as well, compared and found
    equal before the deletion. `policy` is what was asked for.
    """

    TYPE: ClassVar[str] = "segments.pruned"
    segments: tuple[PrunedSegment, ...]
    by: Name
    policy: Free
    reason: str | None = None
    repeated: tuple[tuple[Name, Count, Count], ...] | None = None
