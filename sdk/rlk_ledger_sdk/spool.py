"""One writer's spool: a directory of preallocated files, frames appended so that they become valid in order.

Every mutable field is owned by the recorder's critical section. The order that makes a kill or an asynchronous
exception at any instruction harmless:

1. frame: body, checksum, **length word**, then `at`. A frame whose length word is stored counts, and `resync` moves
   `at` past it when the exception fell between the two.
2. roll: the new file is complete under a temporary name (`_fresh`), is renamed, and only then adopted. `resync`
   adopts a renamed file and forgets one that was not renamed, or whose first number was used up by a loss since.
3. close: no file can be written or made any more. A fork may come inside any step; the child closes the parent's spool
   at once, so what it was doing there ends with an exception, and a file one of the two makes is never the other's.
"""

import contextlib
import mmap
import os
import struct
from pathlib import Path

import msgspec
from google_crc32c import extend

from rlk_ledger_schemas.errors import EventError, SpoolError
from rlk_ledger_schemas.frame import FRAME_HEAD, SpoolHeader, crc_seed, encode_header, frame_size, read_frame
from rlk_ledger_sdk.budget import Budget
from rlk_ledger_sdk.filesystem import Method
from rlk_ledger_sdk.loss_page import LossPage
from rlk_ledger_sdk.presence import Presence

FIRST_FILE = 1 << 20
LARGEST_FILE = 64 << 20
RESERVE = 32 << 10
"""Bytes at the end of every file for gap events and the closing event: they fit when nothing else does."""
MAX_PAYLOAD = (1 << 32) - 16
"""Bytes one event may have: its length word has 32 bits."""
_PAGE = 4096
_SMALL = 1024
_U32 = struct.Struct("<I")
_put_u32 = _U32.pack_into
_pack_u64 = struct.Struct("<Q").pack


class Full(SpoolError):
    """No room for this event now: the budget is used up or the disk is full."""


class _File(msgspec.Struct, gc=False):
    """An open spool file and everything that depends on which file is open."""

    path: Path
    temporary: Path
    number: int
    fd: int
    size: int
    start: int
    seed: int
    first_seq: int
    map: mmap.mmap | None

    def close(self) -> None:
        if self.map is not None:
            with contextlib.suppress(BufferError):  # somebody holds a view of it; it goes when they do
                self.map.close()
            self.map = None
        if self.fd >= 0:
            fd, self.fd = self.fd, -1
            os.close(fd)


class SpoolWriter:
    """Appends payloads to the files of `directory`; `at` is (offset of the next frame, its sequence number).

    Raises Full when neither the budget nor the disk has room; nothing is written then.
    """

    def __init__(self, directory: Path, header: SpoolHeader, method: Method, budget: Budget) -> None:
        self.at: tuple[int, int] = (0, header.first_seq)
        self._directory = directory
        self._header = header
        self._method = method
        self._budget = budget
        self._presence = Presence(directory)
        self._file: _File | None = None
        self._fresh: _File | None = None
        self._page: LossPage | None = None
        self._kept = b""
        self._map: mmap.mmap | None = None
        self._seed = 0
        self._limit = 0
        self._reach = 0
        self._next_size = FIRST_FILE
        self.number = header.file_number - 1
        self.closed = False

    def put(self, payload: bytes) -> None:
        """Appends one frame; it is there when this returns, for any kill after that. Raises Full."""
        length = len(payload)
        offset, seq = self.at
        end = offset + (length + 15 & -8)  # frame_size(length)
        if end > self._limit:
            self._roll(end - offset)
            offset, seq = self.at
            end = offset + frame_size(length)
        if length < _SMALL:
            crc = extend(self._seed, _pack_u64(offset) + payload)  # a copy costs less than a second call
        else:
            crc = extend(extend(self._seed, _pack_u64(offset)), payload)
        self._reach = end
        data = self._map
        if data is None:
            self._pwrite(offset, crc, payload)
        else:
            data[offset + 8 : offset + 8 + length] = payload
            _put_u32(data, offset + 4, crc)
            _put_u32(data, offset, length)
        self.at = (end, seq + 1)

    def put_reserved(self, payload: bytes) -> bool:
        """Appends an event in the room kept for gaps and the close; False when even that is used up."""
        file = self._file
        if file is None or self.at[0] + FRAME_HEAD + len(payload) + 7 > file.size:
            return False
        self._limit = file.size
        try:
            self.put(payload)
        except Full:
            return False
        finally:
            self._limit = file.size - RESERVE
        return True

    def make_room(self, *lengths: int) -> None:
        """Sees to it that payloads of these lengths fit into one file, in front of its reserve; raises Full."""
        need = sum(frame_size(length) for length in lengths)
        if self.at[0] + need > self._limit:
            self._roll(need)

    def keep(self, payload: bytes) -> None:
        """Keeps the gap event that has to be put next where a kill leaves it; b"" when there is none any more.

        Before the first file there is no such place: then it is kept as soon as there is.
        """
        self._kept = payload
        page = self._page
        if page is not None:
            with contextlib.suppress(OSError):  # a disk that takes no byte at all; the gap is still put when it does
                page.keep(payload) if payload else page.forget()

    def skip(self) -> int:
        """Consumes one sequence number that holds nothing; returns it."""
        offset, seq = self.at
        self.at = (offset, seq + 1)
        return seq

    def resync(self) -> None:
        """Makes the state agree with the bytes after an exception left the critical section half-way.

        Raises Full where the disk does not say what the bytes are; the file then takes no further frame.
        """
        try:
            self._resync_fresh()
            self._resync_frame()
        except OSError as error:
            if self._file is not None:
                self._file.size = self.at[0]
                self._limit = 0
            raise Full(f"the spool {self._directory} cannot be read: {error.strerror}") from None

    def _resync_fresh(self) -> None:
        fresh = self._fresh
        if fresh is None:
            return
        if fresh.first_seq == self.at[1] and fresh.path.exists():
            self._adopt(fresh)
            return
        self._fresh = None
        with contextlib.suppress(OSError):
            fresh.temporary.unlink(missing_ok=True)
        fresh.close()

    def _resync_frame(self) -> None:
        file = self._file
        if file is None:
            return
        self._limit = file.size - RESERVE
        offset, seq = self.at
        if offset >= file.size:
            return
        tail = self._read(file, offset, max(self._reach - offset, 8))
        length = _U32.unpack_from(tail)[0]
        payload = self._frame_at(file, offset, length)
        if payload is not None:
            self.at = (offset + frame_size(length), seq + 1)
        elif tail.strip(b"\0"):
            self._write(file, offset, bytes(len(tail)))

    def removed(self) -> bool:
        """Whether somebody removed the open file: nobody will ever read what is put there, so the next put rolls."""
        file = self._file
        try:
            if file is None or file.path.exists():
                return False
        except OSError:
            return False
        file.size, self._limit = self.at[0], 0
        return True

    def close(self) -> None:
        """Closes the files for good; the bytes stay for the shipper. What is under way in here raises."""
        self.closed = True
        files = (self._file, self._fresh)
        page, self._page = self._page, None
        self._file, self._fresh, self._map, self._limit = None, None, None, 0
        if page is not None:
            page.close()
        self._presence.close()
        for file in files:
            if file is not None:
                file.close()

    # -- files ------------------------------------------------------------------------------------------------------

    def _roll(self, need: int) -> None:
        """Opens the next file, large enough for a frame of `need` bytes; raises Full."""
        if self.closed:
            raise Full(f"the spool {self._directory} is closed")
        if (refusal := self._budget.refusal()) is not None:
            raise Full(refusal)
        try:
            self._open_next(need)
        except Full as full:
            self._budget.refuse(str(full))
            raise

    def _open_next(self, need: int) -> None:
        if need > MAX_PAYLOAD:
            raise EventError(f"an event of {need} bytes is larger than 4 GiB; record it in parts.")
        least = max(FIRST_FILE, -(-(need + RESERVE + _PAGE) // _PAGE) * _PAGE)
        size = self._within_budget(max(self._next_size, least), least)
        while True:
            try:
                self._directory.parent.mkdir(mode=0o700, exist_ok=True)  # somebody may have removed the whole spool
                self._directory.mkdir(mode=0o700, exist_ok=True)
                self._open_page()
                self._fresh = fresh = self._prepare(self.number + 1, size)
                if self.closed:
                    fresh.close()
                    raise Full(f"the spool {self._directory} was closed while a file was made")
                try:
                    fresh.temporary.rename(fresh.path)
                except OSError:
                    # A child, forked at this very call, may have renamed it; or the disk did and said that it failed.
                    # Where that cannot be told the number is not used again: a shipper may have opened the file.
                    self.number = fresh.number
                    if not fresh.path.exists():
                        raise
                break
            except OSError as error:
                if size == least:
                    raise Full(f"no spool file of {size} bytes in {self._directory}: {error.strerror}") from None
                size = max(least, size // 2)
        self._adopt(fresh)

    def _open_page(self) -> None:
        """Makes the place for losses, unless it is there: before a first file, so that whoever finds one finds both."""
        if self._page is not None and self._page.path.exists():
            return
        page = None
        with contextlib.suppress(OSError):  # a file larger than this is about to be made: that one decides
            page = LossPage(self._directory, self._header.writer_id)
        if page is not None and self.closed:
            page.close()
        elif page is not None:
            self._page = page
            if self._kept:
                self.keep(self._kept)

    def _within_budget(self, size: int, least: int) -> int:
        """`size`, or what the budget leaves of it, not less than `least`; raises Full."""
        last_seq = self.at[1] - 1
        if self._file is not None:
            self._budget.finished(self._file.path, self._file.size, last_seq)
        while not self._budget.fits(size, last_seq):
            if size == least:
                if self._budget.wait(size, last_seq):
                    break
                raise Full(f"the spool budget is used up ({size} more bytes do not fit) in {self._directory}")
            size = max(least, size // 2)
        return size

    def _prepare(self, number: int, size: int) -> _File:
        """A complete spool file under its temporary name: allocated, header written, mapped."""
        first_seq = self.at[1]
        place = {"file_number": number, "first_seq": first_seq, "locked": self._presence.hold()}
        header = encode_header(msgspec.structs.replace(self._header, **place))
        path, fd = self._temporary(number)
        final = self._directory / f"{number:08d}.spool"
        seed = crc_seed(self._header.writer_id, number)
        file = _File(final, path, number, fd, size, len(header), seed, first_seq, None)
        try:
            os.posix_fallocate(fd, 0, size)
            self._write(file, 0, header)
            if self._method == "mmap":
                file.map = mmap.mmap(fd, size)
                file.fd = -1
                os.close(fd)  # a mapping keeps a descriptor of its own
        except BaseException:
            with contextlib.suppress(OSError):
                path.unlink()
            with contextlib.suppress(OSError):
                file.close()
            raise
        return file

    def _adopt(self, fresh: _File) -> None:
        """Switches to a renamed file; running it twice is the same as once."""
        old = self._file
        self.at = (fresh.start, fresh.first_seq)
        self._file = fresh
        self._map = fresh.map
        self._seed = fresh.seed
        self.number = fresh.number
        self._limit = fresh.size - RESERVE
        self._reach = 0
        self._next_size = min(max(fresh.size, FIRST_FILE) * 2, LARGEST_FILE)
        self._fresh = None
        if old is not None and old is not fresh:
            old.close()

    def _temporary(self, number: int) -> tuple[Path, int]:
        """A new file under a name nobody else has, opened: (its path, its descriptor)."""
        while not self.closed:
            path = self._directory / f".{number:08d}.{os.urandom(4).hex()}.tmp"
            with contextlib.suppress(FileExistsError):  # a child, forked at this very line, took the name
                return path, os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        raise Full(f"the spool {self._directory} was closed before a file was made")

    # -- bytes ------------------------------------------------------------------------------------------------------

    def _pwrite(self, offset: int, crc: int, payload: bytes) -> None:
        """A frame without a mapping: body first, length word last. A full disk ends the file where it is valid."""
        file = self._file
        assert file is not None
        try:
            self._write(file, offset + 4, _U32.pack(crc) + payload)
            self._write(file, offset, _U32.pack(len(payload)))
        except OSError as error:
            file.size = offset
            self._limit = offset - RESERVE
            with contextlib.suppress(OSError):
                os.ftruncate(file.fd, offset)
            raise Full(f"no room for {len(payload)} bytes in {file.path}: {error.strerror}") from None

    @staticmethod
    def _write(file: _File, offset: int, data: bytes) -> None:
        if file.map is not None:
            file.map[offset : offset + len(data)] = data
            return
        view = memoryview(data)
        while view:  # `file.fd` anew each time: a child forked meanwhile closed it, and may use its number again
            done = os.pwrite(file.fd, view, offset)
            view, offset = view[done:], offset + done

    @staticmethod
    def _read(file: _File, offset: int, size: int) -> bytes:
        if file.map is not None:
            return file.map[offset : offset + size].ljust(8, b"\0")
        return os.pread(file.fd, size, offset).ljust(8, b"\0")

    def _frame_at(self, file: _File, offset: int, length: int) -> bytes | None:
        if length == 0 or offset + FRAME_HEAD + length > file.size:
            return None
        if file.map is not None:
            return read_frame(file.map, offset, file.seed)
        crc, payload = _U32.unpack_from(self._read(file, offset + 4, 8))[0], self._read(file, offset + 8, length)
        same = int(extend(extend(file.seed, _pack_u64(offset)), payload[:length])) == crc
        return payload[:length] if same else None
