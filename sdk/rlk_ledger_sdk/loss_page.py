"""The gap event of losses that are not stated yet, kept ready in a file of its own: `<writer directory>/losses`.

An event that finds no room is counted here before record() returns, so that a kill at any instruction leaves the exact
range, count and bytes behind. The file is made beside the writer's first spool file and needs no room later:

    two slots of 8 KiB, each a frame as in a spool file; the one that holds the higher sequence number counts

A slot is written while the other one stands, by `pwrite`, which no file system answers with a signal. What it holds is,
byte for byte, the event that goes into a spool file when there is room again; until then nothing else takes its number,
so that it can be recovered twice and never contradict.
"""

import os
import struct
from pathlib import Path

from rlk_ledger_schemas.codec import decode_envelope, decode_payload
from rlk_ledger_schemas.errors import FormatError
from rlk_ledger_schemas.frame import FRAME_HEAD, crc_seed, frame_crc, read_frame

NAME = "losses"
_SLOT = 8 << 10
_SIZE = 2 * _SLOT
_FILE_NUMBER = 0xFFFFFFFF
"""Stands in a slot's checksum where a spool file has its number, so that neither is ever taken for the other."""
_HEAD = struct.Struct("<II")


class LossPage:
    """The file, open for one writer; owned by the recorder's critical section. Raises OSError where none can be."""

    def __init__(self, directory: Path, writer_id: str) -> None:
        self.path = directory / NAME
        self._seed = crc_seed(writer_id, _FILE_NUMBER)
        self._next = 0  # the slot to write: the other one holds what counts
        self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(self._fd, 0, _SIZE)
        except BaseException:
            self.close()
            raise

    def keep(self, payload: bytes) -> None:
        """Makes `payload` what counts; a cut at any instruction leaves it or what counted before."""
        offset = self._next * _SLOT
        if FRAME_HEAD + len(payload) > _SLOT:
            return
        self._write(offset, bytes(_HEAD.size))
        self._write(offset + FRAME_HEAD, payload)
        self._write(offset, _HEAD.pack(len(payload), frame_crc(self._seed, offset, payload)))
        self._next = 1 - self._next

    def forget(self) -> None:
        """Nothing is outstanding any more: a spool file states it."""
        for slot in (self._next, 1 - self._next):
            self._write(slot * _SLOT, bytes(_HEAD.size))

    def close(self) -> None:
        """Closes the file; what it holds stays for whoever recovers the spool."""
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)

    def _write(self, offset: int, data: bytes) -> None:
        view = memoryview(data)
        while view:
            done = os.pwrite(self._fd, view, offset)
            view, offset = view[done:], offset + done


def read_losses(directory: Path, writer_id: str, last_seq: int) -> bytes | None:
    """The payload of the gap event that a writer still owed when it ended, None when it owed nothing.

    `last_seq` is the number of the last event in its spool files (-1 for none): a gap with a number up to that one
    stands in a file already. Damage reads as nothing. Raises OSError where the disk does not say.
    """
    try:
        data = (directory / NAME).read_bytes()
    except FileNotFoundError:
        return None
    best: tuple[int, bytes] | None = None
    for offset in range(0, _SIZE, _SLOT):
        payload = read_frame(data[: offset + _SLOT], offset, crc_seed(writer_id, _FILE_NUMBER))
        seq = _gap_number(payload, writer_id) if payload is not None else -1
        if payload is not None and seq > last_seq and (best is None or seq > best[0]):
            best = (seq, payload)
    return best[1] if best else None


def _gap_number(payload: bytes, writer_id: str) -> int:
    """The sequence number of a gap event of `writer_id`, -1 when the payload is no such event."""
    try:
        fields = decode_envelope(decode_payload(payload)[0])
    except FormatError:
        return -1
    seq = fields.get("seq")
    if fields["type"] != "gap" or fields.get("writer_id") != writer_id or type(seq) is not int:
        return -1
    return seq
