"""For users' tests: record into memory and look at what was recorded.

with capture() as events:
    my_training_step()
assert [e.type for e in events.of("logprobs")] == ["logprobs"]
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from rlk_ledger_schemas.codec import decode_envelope, decode_payload
from rlk_ledger_schemas.errors import LedgerError
from rlk_ledger_schemas.events import ASSIGNED
from rlk_ledger_schemas.frame import SpoolHeader, crc_seed, decode_header, frame_size, read_frames, unwritten
from rlk_ledger_sdk import api
from rlk_ledger_sdk.config import Config, load_config
from rlk_ledger_sdk.loss_page import read_losses
from rlk_ledger_sdk.recorder import Recorder

_ASSIGNED = ("type", *ASSIGNED)


class Recorded(msgspec.Struct, frozen=True):
    """One recorded event: type, sequence number, the fields the caller gave, and its arrays as lists of numbers."""

    type: str
    seq: int
    fields: dict[str, Any]
    arrays: dict[str, list[Any]]


class Recording(list[Recorded]):
    """The events of one capture(), in order, the writer's own opening events left out."""

    def of(self, *types: str) -> list[Recorded]:
        """The events of these types."""
        return [event for event in self if event.type in types]


def decoded(payload: bytes) -> Recorded:
    """The event in one payload; raises FormatError."""
    envelope, arrays = decode_payload(payload)
    fields = decode_envelope(envelope)
    given = {k: v for k, v in fields.items() if k not in _ASSIGNED}
    return Recorded(fields["type"], fields["seq"], given, {k: v.tolist() for k, v in arrays.items()})


class SpoolImage(msgspec.Struct, frozen=True):
    """What one writer's directory holds: its events in order and, per file, the bytes after the last valid frame.

    The last event may be the gap that the writer still owes when it ends here.
    """

    header: SpoolHeader
    events: list[Recorded]
    bytes_left: list[int]


def read_spool(directory: Path) -> SpoolImage:
    """The longest valid prefix of every spool file of one writer; raises FormatError for a damaged header."""
    events, left, header = [], [], None
    for path in sorted(directory.glob("*.spool")):
        data = path.read_bytes()
        header, offset = decode_header(data)
        for at, payload in read_frames(data, offset, crc_seed(header.writer_id, header.file_number)):
            events.append(decoded(payload))
            offset = at + frame_size(len(payload))
        left.append(unwritten(data, offset))
    if header is None:
        raise LedgerError(f"{directory} holds no spool file.")
    owed = read_losses(directory, header.writer_id, events[-1].seq if events else -1)
    if owed is not None:
        events.append(decoded(owed))
    return SpoolImage(header, events, left)


def unaccounted(events: list[Recorded]) -> list[int]:
    """Sequence numbers up to the last one that neither an event nor a gap accounts for, or that two events claim."""
    claims: dict[int, int] = {}
    for event in events:
        claims[event.seq] = claims.get(event.seq, 0) + 1
        if event.type == "gap":
            for seq in range(event.fields["first"], event.fields["last"] + 1):
                claims[seq] = claims.get(seq, 0) + 1
    return [seq for seq in range(max(claims, default=-1) + 1) if claims.get(seq, 0) != 1]


class MemorySpool:
    """The interface of SpoolWriter over a list: nothing is written, nothing is ever full."""

    def __init__(self, events: Recording) -> None:
        self.at = (0, 0)
        self.number = 0
        self.closed = False
        self._events = events

    def put(self, payload: bytes) -> None:
        """Keeps one event."""
        recorded = decoded(payload)
        if recorded.type not in ("run.opened", "writer.opened"):
            self._events.append(recorded)
        self.at = (0, self.at[1] + 1)

    def put_reserved(self, payload: bytes) -> bool:
        """Keeps one gap event."""
        self.put(payload)
        return True

    def make_room(self, *lengths: int) -> None:
        """There always is."""

    def keep(self, payload: bytes) -> None:
        """A list outlives nothing."""

    def skip(self) -> int:
        """Consumes one sequence number that holds nothing; returns it."""
        seq = self.at[1]
        self.at = (0, seq + 1)
        return seq

    def resync(self) -> None:
        """A list is always in step."""

    def removed(self) -> bool:
        """A list stays."""
        return False

    def close(self) -> None:
        """Takes nothing more."""
        self.closed = True


class MemoryRecorder(Recorder):
    """A recorder into a Recording."""

    def __init__(self, config: Config, events: Recording) -> None:
        self._events = events
        super().__init__(config)

    def _prepare(self) -> None:
        """No spool directory is needed."""

    def _new_spool(self, writer_id: str, directory: Path) -> Any:
        return MemorySpool(self._events)


@contextlib.contextmanager
def capture(**options: Any) -> Iterator[Recording]:
    """Sends everything recorded in the block to the list it yields; options are those of init().

    A malformed event raises. The recorder in force before comes back afterwards.
    """
    config = load_config(
        "memory://capture",
        **{"run_id": "capture", "shipper": "off", "on_error": "raise", "spool": "/nowhere", **options},
    )
    assert config is not None
    events = Recording()
    recorder = MemoryRecorder(config, events)
    before = api.swap(recorder)
    try:
        yield events
    finally:
        api.swap(before)


__all__ = ["MemoryRecorder", "Recorded", "Recording", "SpoolImage", "capture", "decoded", "read_spool", "unaccounted"]
