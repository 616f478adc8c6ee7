"""Is the spool directory a place where a job's events survive, and who carries them away?"""

import fcntl
import mmap
import os
import stat
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from rlk_ledger.doctor.check import Check
from rlk_ledger.leftovers import Left, look
from rlk_ledger.terminal import size_text
from rlk_ledger_sdk.config import DEFAULT_BUDGET
from rlk_ledger_sdk.filesystem import is_network, method_for, name_of
from rlk_ledger_sdk.status import LOCK, lock_is_free

LEAST_FREE = 64 << 20
"""Bytes of free space without which not even one spool file of full size can be made."""
_TRY_BYTES = 1 << 20


class Mount(NamedTuple):
    """The mount a path lies on: its mount point, and which folder of the file system is mounted there."""

    point: str
    root: str


def check_spool(spool: Path, named: str | None, environment: Mapping[str, str]) -> Iterator[Check]:
    """Every check of a spool directory; `named` is a network file system that was asked for by name."""
    there = _nearest(spool)
    yield from _place(spool, there, named)
    yield from _private(there, environment)
    yield from _access(spool, there)
    yield from _space(there, environment)
    if os.access(there, os.W_OK | os.X_OK):
        yield from _writes(there)


def check_leftovers(spool: Path) -> Iterator[Check]:
    """What writers left in the spool, and whether a shipper serves it."""
    if not spool.is_dir():
        yield Check("leftovers", "ok", f"{spool} does not exist yet: nothing waits")
        return
    left = look(spool)
    served = (spool / LOCK).exists() and not lock_is_free(spool)
    yield _shipper(spool, left, served)
    yield from _waiting(spool, left, served)
    for error in sorted({one.error for one in left if one.error and one.waiting}):
        yield Check(
            "shipper errors", "warn", f"the shipper's last words: {error}", "make the ledger answer; it retries"
        )
    yield from _damaged(spool, left)


def _nearest(path: Path) -> Path:
    """`path`, or its nearest parent that exists."""
    while not path.exists() and path != path.parent:
        path = path.parent
    return path


def _place(spool: Path, there: Path, named: str | None) -> Iterator[Check]:
    kind = name_of(str(there))
    how = "a full disk cannot hit a mapped write" if method_for(kind) == "mmap" else "written with pwrite"
    if kind == "tmpfs":
        advice = "point RLK_SPOOL at a local disk"
        yield Check(
            "spool place", "warn", f"{spool} is on tmpfs: it takes memory and does not survive a restart", advice
        )
    elif kind == "overlay":
        advice = "mount a volume of the host there and set RLK_SPOOL"
        yield Check("spool place", "warn", f"{spool} is on overlay: it goes when the container is removed", advice)
    elif is_network(kind) and named != kind:
        advice = f"use a local disk, or ask for it by name: RLK_SPOOL={kind}:{spool}"
        yield Check("spool place", "fail", f"{spool} is on {kind}: its locks and caches cannot be trusted", advice)
    elif is_network(kind):
        advice = "every machine that uses it needs a host name of its own"
        yield Check("spool place", "warn", f"{spool} is on {kind}, which was asked for by name", advice)
    elif kind == "unknown":
        advice = "use ext4 or xfs, or ask its owner whether flock and rename work on it"
        yield Check("spool place", "unknown", f"{spool} is on a file system this program does not know", advice)
    else:
        yield Check("spool place", "ok", f"{spool} is on {kind} ({how})")


def _private(there: Path, environment: Mapping[str, str]) -> Iterator[Check]:
    """Folders that a scheduler or a service manager makes for one job and removes with it."""
    job = environment.get("SLURM_JOB_ID", "")
    mount = mount_of(there, _mounts())
    own = [
        environment[name]
        for name in ("SLURM_TMPDIR", "TMPDIR", "PBS_JOBDIR", "_CONDOR_SCRATCH_DIR")
        if name in environment
    ]
    advice = "point RLK_SPOOL at a disk of the node that outlives the job, such as /var/tmp or the scratch disk"
    if "systemd-private" in mount.root or (job and job in (mount.root + str(there)).replace("/", " ").split()):
        text = f"{there} is private to this job (mounted from {mount.root}): what is left in it goes when the job ends"
        yield Check("spool lifetime", "warn", text, advice)
    elif any(_below(there, folder) for folder in own):
        yield Check(
            "spool lifetime", "warn", f"{there} is the job's own scratch folder: it is emptied at its end", advice
        )
    elif job and mount.point in ("/tmp", "/var/tmp", "/dev/shm"):
        text = f"{there} is on a mount of its own ({mount.point}): job_container/tmpfs removes that when the job ends"
        yield Check("spool lifetime", "warn", text, advice)
    elif _below(there, "/tmp"):
        text = f"{there} is below /tmp, which is emptied at every boot, and by many sites after every job"
        yield Check("spool lifetime", "warn", text, advice)
    else:
        yield Check("spool lifetime", "ok", f"nothing here says that {there} goes when the job ends")


def _mounts() -> str:
    return Path("/proc/self/mountinfo").read_text()


def _below(path: Path, folder: str) -> bool:
    top = Path(folder)
    return folder not in ("", "/") and (path == top or top in path.parents)


def mount_of(path: Path, mountinfo: str) -> Mount:
    """The mount `path` lies on, from the text of /proc/self/mountinfo (fields: proc(5))."""
    best = Mount("/", "/")
    for line in mountinfo.splitlines():
        fields = line.split(" ")
        if len(fields) < 5:
            continue
        root, point = (_unescaped(field) for field in fields[3:5])
        if (point == "/" or _below(path, point)) and len(point) >= len(best.point):
            best = Mount(point, root)
    return best


def _unescaped(field: str) -> str:
    return field.replace("\\040", " ").replace("\\011", "\t").replace("\\012", "\n").replace("\\134", "\\")


def _access(spool: Path, there: Path) -> Iterator[Check]:
    if there != spool:
        if os.access(there, os.W_OK | os.X_OK):
            yield Check("spool access", "ok", f"{spool} does not exist yet and can be made, with mode 0700")
        else:
            yield Check("spool access", "fail", f"{spool} cannot be made: {there} is not writable", "set RLK_SPOOL")
        return
    if not spool.is_dir():
        yield Check("spool access", "fail", f"{spool} is no directory", "set RLK_SPOOL")
        return
    info = spool.stat()
    mode = stat.S_IMODE(info.st_mode)
    if not os.access(spool, os.R_OK | os.W_OK | os.X_OK):
        yield Check("spool access", "fail", f"{spool} cannot be used: it belongs to uid {info.st_uid}", "set RLK_SPOOL")
    elif info.st_uid != os.getuid():
        text = f"{spool} belongs to uid {info.st_uid}, this is uid {os.getuid()}"
        yield Check("spool access", "warn", text, "a shipper of the other user cannot read what is spooled here")
    elif mode & 0o077:
        yield Check("spool access", "warn", f"{spool} has mode {mode:04o}: others can look", f"chmod 700 {spool}")
    else:
        yield Check("spool access", "ok", f"{spool} is this user's alone (mode {mode:04o})")


def _space(there: Path, environment: Mapping[str, str]) -> Iterator[Check]:
    disk = os.statvfs(there)
    free = disk.f_bavail * disk.f_frsize
    budget = int(float(environment.get("RLK_BUDGET_BYTES") or DEFAULT_BUDGET))
    text = f"{size_text(free)} free, one process may use {size_text(budget)} (RLK_BUDGET_BYTES)"
    if free < LEAST_FREE:
        yield Check("spool space", "fail", f"only {text}", "free space, or point RLK_SPOOL at another disk")
    elif free < budget:
        yield Check("spool space", "warn", text, "an outage of the ledger fills this disk before the budget holds")
    else:
        yield Check("spool space", "ok", text)
    if disk.f_files and disk.f_favail < 1000:
        yield Check("spool inodes", "warn", f"{disk.f_favail} inodes are free", "remove small files from this disk")


def _writes(there: Path) -> Iterator[Check]:
    """Does here what a recorder does: preallocate, map, write, sync, lock."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix=".doctor-", dir=there) as name:
        fd = os.open(Path(name) / "probe", os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.posix_fallocate(fd, 0, _TRY_BYTES)
            with mmap.mmap(fd, _TRY_BYTES) as data:
                data[:8] = b"RLKSPOOL"
            same = os.pread(fd, 8, 0) == b"RLKSPOOL"
            os.fdatasync(fd)
        finally:
            os.close(fd)
        locks = _locks(Path(name))
    took = 1000 * (time.monotonic() - began)
    if same:
        yield Check("spool write", "ok", f"1 MiB was preallocated, mapped, read back and synced in {took:.0f} ms")
    else:
        yield Check("spool write", "fail", "what is written through a mapping is not read back", "use another disk")
    if locks:
        yield Check("spool locks", "ok", "flock works: other containers can tell which writers live")
    else:
        advice = "share the pid namespace with a sidecar (shareProcessNamespace), or use a local disk"
        yield Check(
            "spool locks", "warn", "flock does not exclude here: writers of other containers look unknown", advice
        )


def _locks(folder: Path) -> bool:
    """Whether a second holder of a folder's lock is refused."""
    first, second = (os.open(folder, os.O_RDONLY | os.O_DIRECTORY) for _ in range(2))
    try:
        fcntl.flock(first, fcntl.LOCK_EX | fcntl.LOCK_NB)
        fcntl.flock(second, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    else:
        return False
    finally:
        os.close(first)
        os.close(second)


def _shipper(spool: Path, left: list[Left], served: bool) -> Check:
    alive = sum(one.state == "alive" for one in left)
    if served:
        return Check("shipper", "ok", f"a shipper serves {spool}; {alive} writers live")
    if alive:
        text = f"{alive} writers live in {spool} and no shipper serves it"
        return Check("shipper", "warn", text, f"`rlk-ledger ship --spool {spool}`, unless they ship inline")
    return Check("shipper", "ok", "no shipper runs and no writer needs one")


def _waiting(spool: Path, left: list[Left], served: bool) -> Iterator[Check]:
    gone = [one for one in left if one.state in ("dead", "closed") and one.waiting]
    unknown = [one for one in left if one.state == "unknown"]
    if gone:
        events = sum(one.waiting for one in gone)
        text = f"{events} events of {len(gone)} writers that ended wait ({size_text(sum(one.size for one in gone))})"
        advice = "the shipper carries them" if served else f"`rlk-ledger recover {spool}`"
        yield Check("leftovers", "warn", text, advice)
    if unknown:
        text = f"{len(unknown)} writers ran where this machine cannot look"
        advice = f"`rlk-ledger recover {spool} --assume-dead` once their machine or container is gone"
        yield Check("leftovers", "unknown", text, advice)
    if not gone and not unknown:
        yield Check("leftovers", "ok", f"no events of writers that ended wait in {spool}")


def _damaged(spool: Path, left: list[Left]) -> Iterator[Check]:
    damaged = [one for one in left if one.damaged or one.state == "unreadable" or one.lost_bytes]
    for one in damaged:
        text = (
            f"writer {one.writer_id}: {one.lost_bytes} bytes are no whole event, {one.damaged} files were set aside"
            f"{', no file has a readable header' if one.state == 'unreadable' else ''}"
        )
        yield Check("damage", "warn", text, f"look at {spool / one.writer_id}; `rlk-ledger recover` states the loss")
