"""Reading one writer's spool directory: what is there to ship, what is finished, what was lost.

A file is finished when it can get no further frame: a newer file exists, the writer said it closed, or its process is
dead. Whether a newer file exists and whether the process lives is looked at *before* reading, so that nothing written
in between is missed. An invalid frame before that moment means "not yet"; after it, it is a tear and its bytes are
counted. Bytes are read, never mapped: a file that shrinks under us is a short read, not a signal. A writer that ended
in an outage left its last gap event beside its files (`rlk_ledger_sdk.loss_page`); it is read after them.
"""

import contextlib
import os
import struct
from pathlib import Path

from rlk_ledger.records import EVENT_BYTES, Record, make_record
from rlk_ledger_schemas.codec import decode_envelope, decode_payload
from rlk_ledger_schemas.errors import FormatError
from rlk_ledger_schemas.frame import FRAME_HEAD, SpoolHeader, crc_seed, decode_header, frame_size, read_frame, unwritten
from rlk_ledger_sdk.loss_page import read_losses
from rlk_ledger_sdk.presence import held
from rlk_ledger_sdk.process import is_alive, same_kernel

SUFFIX = ".spool"
DAMAGED = ".damaged"
_CHUNK = 1 << 20
_ZEROS = bytes(_CHUNK)
_LENGTH = struct.Struct("<I")


class SpoolFile:
    """One spool file being read; owned by its WriterSpool.

    It is open from the first byte read until it is finished, so that a spool of any number of files and dead writers
    is read with one descriptor, and one more for every writer that lives.
    """

    def __init__(self, path: Path, number: int) -> None:
        self.path = path
        self.number = number
        self.fd = -1
        self.offset = 0
        self.last_seq = -1
        self.finished = False
        self.damaged = False
        self.unsynced = False  # a byte was read that a loss of power could take back
        self.header: SpoolHeader | None = None
        self._seed = 0
        self._buffer = b""
        self._base = 0

    def open_header(self, writer_id: str) -> bool:
        """Whether the header is readable; reads it when it was not yet. Raises FormatError when it is another's."""
        if self.header is not None:
            return True
        head = os.pread(self._opened(), _CHUNK, 0)
        try:
            header, self.offset = decode_header(head)
        except FormatError:
            return False
        if header.writer_id != writer_id or header.file_number != self.number:
            raise FormatError(f"{self.path} says it is file {header.file_number} of writer {header.writer_id}.")
        self.header = header
        self._seed = crc_seed(writer_id, self.number)
        return True

    def next_payload(self) -> bytes | None:
        """The payload of the next valid frame, moving past it; None where none stands yet."""
        for fresh in (False, True):
            at = self.offset - self._base
            if fresh:
                self._fill()
                at = 0
            if at + FRAME_HEAD <= len(self._buffer):
                payload = read_frame(self._buffer, at, self._seed, self._base)
                if payload is not None:
                    self.offset += frame_size(len(payload))
                    if len(payload) > _CHUNK:
                        self.let_go()
                    return payload
        return None

    def _fill(self) -> None:
        self._base = self.offset
        self._buffer = os.pread(self._opened(), FRAME_HEAD, self.offset)
        if len(self._buffer) == FRAME_HEAD:
            (length,) = _LENGTH.unpack_from(self._buffer)
            if length and self.offset + length <= os.fstat(self.fd).st_size:
                self._buffer = os.pread(self.fd, max(_CHUNK, frame_size(length)), self.offset)

    def let_go(self) -> None:
        """Gives back the memory of what was read ahead."""
        self._buffer = b""

    def bytes_left(self) -> int:
        """Bytes after the last valid frame up to the last one that is not zero."""
        fd = self._opened()
        size = os.fstat(fd).st_size
        left = 0
        for start in range(self.offset, size, _CHUNK):
            block = os.pread(fd, _CHUNK, start)
            if block != _ZEROS[: len(block)]:
                left = start - self.offset + unwritten(block, 0)
        return left

    def sync(self) -> None:
        """Makes what was read survive a power loss."""
        os.fdatasync(self._opened())
        self.unsynced = not self.finished
        if self.finished:
            self.close()

    def _opened(self) -> int:
        if self.fd < 0:
            self.fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        return self.fd

    def close(self) -> None:
        """Closes the descriptor; the file stays."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class WriterSpool:
    """One writer's directory. `read_seq` is the last number read, `lost_bytes` what no frame accounts for so far.

    `assume_dead` says what to believe of a writer that this machine cannot look at (`alive` None): set it only when
    the machine it ran on is gone.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.writer_id = directory.name
        self.header: SpoolHeader | None = None
        self.files: list[SpoolFile] = []
        self.read_seq = -1
        self.synced_seq = -1
        self.lost_bytes = 0
        self.closed = False
        self.alive: bool | None = True
        self.unreadable = False
        self.events_read = 0
        self.assume_dead = False
        self._gone = -1  # files up to this number were released
        self._damage: str | None = None
        self._trouble: str | None = None  # as `_damage`, and over when the disk works again
        self._hidden = False  # files may be there that could not be listed

    @property
    def problem(self) -> str | None:
        """What is wrong with this spool, in one sentence: damage that stays, or a disk that fails now."""
        return self._damage or self._trouble

    @property
    def ended(self) -> bool:
        """Whether no event can come any more: the writer closed or is dead, and all it left was read."""
        return (self.closed or self.alive is False) and not self._hidden and all(file.finished for file in self.files)

    @property
    def died(self) -> bool:
        """Whether the writer ended without closing."""
        return self.ended and not self.closed

    def look(self) -> None:
        """Finds out who writes here, whether it lives and which files there are; to be called before every `poll`."""
        self._trouble = None
        if self.header is None:
            self._find_files()
            self._find_header()
        if self.header is not None:
            alive = self._lives(self.header)
            self.alive = False if alive is None and self.assume_dead else alive
        self._find_files()

    def poll(self, room: int) -> tuple[list[Record], int]:
        """The records that can be read now, until about `room` bytes; and their bytes, by `records.weight`."""
        out: list[Record] = []
        used = 0
        self.unreadable = False
        for file in self.files:
            if file.finished:
                continue
            newest = file is self.files[-1]
            used += self._read(file, room - used, out)
            if used >= room:
                break
            if self.unreadable:
                break
            if not newest or self.closed or self.alive is False:
                if newest and not self._hidden and not self._read_losses(file, out):
                    break
                if not self._finish(file):
                    break
        return out, used

    def sync(self) -> None:
        """Makes every event read so far survive a power loss."""
        seq = self.read_seq
        for file in self.files:
            if file.unsynced:
                with contextlib.suppress(FileNotFoundError):  # removed: there is nothing left to lose
                    file.sync()
        self.synced_seq = max(self.synced_seq, seq)

    def release(self, committed: int) -> int:
        """Deletes finished files whose events are all committed; damaged ones are set aside. Returns bytes freed."""
        freed = 0
        while self.files and self.files[0].finished and self.files[0].last_seq <= committed:
            file = self.files[0]
            try:
                size = file.path.stat().st_size
                if file.damaged:
                    file.path.rename(file.path.with_name(file.path.name + DAMAGED))
                else:
                    file.path.unlink()
            except FileNotFoundError:
                size = 0
            except OSError as error:  # it stays, and is known to be committed: the next cycle tries again
                self._trouble = f"cannot remove {file.path}: {error.strerror}"
                break
            del self.files[0]
            freed += size
            file.close()
            self._gone = file.number
        return freed

    def headless_bytes(self) -> int:
        """Bytes in files that do not say whose they are, as far as the disk gives them out."""
        total = 0
        for file in self.files:
            if file.header is None:
                with contextlib.suppress(OSError):
                    total += file.bytes_left()
        return total

    def close(self) -> None:
        """Closes every descriptor."""
        for file in self.files:
            file.close()

    def _lives(self, header: SpoolHeader) -> bool | None:
        """Whether the writer lives: by its process; where that cannot be seen, by its lock, under the same kernel."""
        alive = is_alive(header)
        if alive is not None or not header.locked or not same_kernel(header):
            return alive
        return held(self.directory)

    def _find_header(self) -> None:
        for file in self.files:
            try:
                if self.header is None and file.open_header(self.writer_id):
                    self.header = file.header
            except FormatError:
                pass  # `poll` deals with it
            except OSError as error:
                self._fails(file, error)

    def _find_files(self) -> None:
        """Notes the files that are new, in order."""
        known = {file.number for file in self.files}
        found = []
        self._hidden = False
        try:
            with os.scandir(self.directory) as entries:
                for entry in entries:
                    stem = entry.name.removesuffix(SUFFIX)
                    if stem == entry.name or not stem.isdecimal() or int(stem) in known or int(stem) <= self._gone:
                        continue
                    if entry.is_file(follow_symlinks=False):
                        found.append((int(stem), Path(entry.path)))
                    else:
                        self._damage = f"{entry.path} is no regular file; it is left alone"
            for number, path in sorted(found):
                self.files.append(SpoolFile(path, number))
        except FileNotFoundError:
            pass  # removed meanwhile
        except OSError as error:
            self._hidden = True
            self._trouble = f"cannot read {error.filename}: {error.strerror}"

    def _read(self, file: SpoolFile, room: int, out: list[Record]) -> int:
        """Appends what `file` holds to `out`, until `room` bytes; returns the bytes taken."""
        try:
            if not file.open_header(self.writer_id):
                return 0
        except FormatError as error:
            self._poison(file, str(error), 0)
            return 0
        except FileNotFoundError:
            return 0  # removed meanwhile
        except OSError as error:
            self._fails(file, error)
            return 0
        used = 0
        while used < room and (payload := self._next(file)) is not None:
            used += len(payload) + EVENT_BYTES
            file.unsynced = True
            try:
                record = make_record(*decode_payload(payload))
                if record.writer_id != self.writer_id or record.seq <= self.read_seq:
                    raise FormatError(f"event {record.seq} of {record.writer_id} follows {self.read_seq}.")
            except FormatError as error:
                self._poison(file, f"{file.path}, frame before byte {file.offset}: {error}", frame_size(len(payload)))
                continue
            out.append(record)
            self.events_read += 1
            file.last_seq = self.read_seq = record.seq
            if b"writer.closed" in record.envelope and decode_envelope(record.envelope)["type"] == "writer.closed":
                self.closed = True
        file.let_go()
        return used

    def _read_losses(self, file: SpoolFile, out: list[Record]) -> bool:
        """Appends the gap event of what the writer had lost and not stated yet; `file` stays until it is committed.

        False where the disk does not say.
        """
        try:
            payload = read_losses(self.directory, self.writer_id, self.read_seq)
        except OSError as error:
            self._fails(file, error)
            return False
        if payload is not None:
            record = make_record(*decode_payload(payload))
            out.append(record)
            self.events_read += 1
            file.last_seq = self.read_seq = record.seq
        return True

    def _next(self, file: SpoolFile) -> bytes | None:
        """The file's next payload; None also where the disk fails: what was read before must not be lost with it."""
        try:
            return file.next_payload()
        except OSError as error:
            self._fails(file, error)
            return None

    def _fails(self, file: SpoolFile, error: OSError) -> None:
        """The disk fails here: nothing of this writer is read past it until it does not."""
        self._trouble = f"cannot read {file.path}: {error.strerror}"
        self.unreadable = True

    def _poison(self, file: SpoolFile, problem: str, size: int) -> None:
        """A frame that is whole and still not an event: counted as lost, its file kept for a person to look at."""
        self.lost_bytes += size
        self._damage = problem
        file.damaged = True

    def _finish(self, file: SpoolFile) -> bool:
        """Counts what is left in a file that gets no further frame; False where the disk does not say."""
        try:
            left = file.bytes_left()
        except FileNotFoundError:
            left = 0
        except OSError as error:
            self._fails(file, error)
            return False
        file.finished = True
        file.close()
        if file.header is None:
            self.lost_bytes += left
            file.damaged = True
        elif not self.closed or file is not self.files[-1]:
            self.lost_bytes += left
        return True
