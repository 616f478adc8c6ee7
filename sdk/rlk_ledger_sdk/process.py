"""This process's identity, and whether the process behind a spool file still lives."""

import os
import socket
from pathlib import Path
from typing import Protocol

import msgspec


class Identity(msgspec.Struct, frozen=True):
    """Who a writer is on this machine: enough to tell a live process from a reused pid."""

    pid: int
    process_start: str
    host: str
    boot_id: str


class Who(Protocol):
    """The part of a spool header that names a process."""

    @property
    def pid(self) -> int: ...
    @property
    def process_start(self) -> str: ...
    @property
    def host(self) -> str: ...
    @property
    def boot_id(self) -> str: ...


def identity() -> Identity:
    """The identity of the calling process; `process_start` is `<start time in ticks>:<pid namespace inode>`."""
    pid = os.getpid()
    start = f"{_start_time('self') or 0}:{_pid_namespace()}"
    return Identity(pid, start, socket.gethostname(), _boot_id())


def new_writer_id() -> str:
    """128 random bits from the operating system, as 32 hex digits."""
    return os.urandom(16).hex()


def is_alive(header: Who) -> bool | None:
    """Whether the process that wrote `header` still runs: True, False, or None where this machine cannot know."""
    here = identity()
    if header.host != here.host:
        return None
    if not header.boot_id or not here.boot_id:
        return None
    if header.boot_id != here.boot_id:
        return False
    start, _, namespace = header.process_start.partition(":")
    if namespace == "0" or namespace != here.process_start.partition(":")[2]:
        return None
    if not _exists(header.pid):
        return False
    now = _start_time(str(header.pid)) if _proc_is_ours() else None
    return None if now is None else now == start


def same_kernel(header: Who) -> bool:
    """Whether `header`'s process ran under the kernel that runs now: then its locks are seen here."""
    return header.boot_id != "" and header.boot_id == _boot_id()


def _exists(pid: int) -> bool:
    """Whether a process (or zombie) of this pid namespace has this id, whatever /proc shows."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        pass
    return True


def _proc_is_ours() -> bool:
    """Whether /proc shows this pid namespace: one entered without mounting it anew sees another's processes."""
    try:
        return os.readlink("/proc/self") == str(os.getpid())  # noqa: PTH115
    except OSError:
        return False


def _start_time(pid: str) -> str | None:
    """Field 22 of /proc/PID/stat; empty for a process that has ended, None when the kernel does not say."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return None if pid != "self" and _exists(int(pid)) else ""  # hidden from us (hidepid), or gone
    except OSError:
        return None
    fields = stat[stat.rindex(b")") + 2 :].split()
    return "" if fields[0] in (b"Z", b"X") else fields[19].decode()


def _pid_namespace() -> int:
    try:
        return Path("/proc/self/ns/pid").stat().st_ino
    except OSError:
        return 0


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
