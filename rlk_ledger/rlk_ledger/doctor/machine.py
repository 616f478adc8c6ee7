"""Versions, limits, clock and container of this process: what recording, shipping and reading rest on."""

import ctypes
import importlib.metadata
import importlib.util
import multiprocessing
import os
import platform
import re
import resource
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from rlk_ledger.clients import EXTRAS, PACKAGES
from rlk_ledger.doctor.check import Check
from rlk_ledger.terminal import size_text
from rlk_ledger_schemas.errors import ConfigError
from rlk_ledger_schemas.frame import FORMAT as SPOOL_FORMAT
from rlk_ledger_schemas.objects import FORMAT
from rlk_ledger_sdk.choices import nearest
from rlk_ledger_sdk.config import load_config
from rlk_ledger_sdk.spool import LARGEST_FILE

_NEEDED = re.compile(r"([A-Za-z0-9_.-]+)\s*>=\s*([0-9.]+)\s*$")
_LEAST_FILES = 1024
_LEAST_MEMORY = 1 << 30
_UNSYNCHRONISED = 0x40  # STA_UNSYNC of adjtimex(2)


def check_versions(url: str | None) -> Iterator[Check]:
    """This version, Python, and the libraries against the ranges the distribution declares."""
    try:
        requires = importlib.metadata.requires("rlk-ledger") or []
        own = importlib.metadata.version("rlk-ledger")
    except importlib.metadata.PackageNotFoundError:
        requires, own = [], "from a source tree"
    text = f"rlk-ledger {own} on Python {platform.python_version()}, {platform.system()} {platform.machine()}"
    yield Check("version", "ok", f"{text}; writes and reads ledger format {FORMAT}, spool format {SPOOL_FORMAT}")
    yield _libraries(requires)
    scheme = (url or "").partition("://")[0] if "://" in (url or "") else ""
    if scheme in EXTRAS:
        yield _client(scheme, requires)


def _libraries(requires: list[str]) -> Check:
    """pyarrow, duckdb, msgspec and the others: there, and not older than declared."""
    seen, wrong = [], []
    for line in requires:
        match = _NEEDED.match(line.partition(";")[0].strip())
        if match is None or ";" in line:
            continue
        name, least = match[1], match[2]
        try:
            there = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            wrong.append(f"{name} is missing")
            continue
        seen.append(f"{name} {there}")
        if numbers(there) < numbers(least):
            wrong.append(f"{name} {there} is older than {least}")
    if wrong:
        return Check("libraries", "fail", "; ".join(wrong), "pip install --upgrade rlk-ledger")
    if not seen:
        return Check("libraries", "unknown", "this installation declares no requirements", "pip install rlk-ledger")
    return Check("libraries", "ok", ", ".join(seen))


def numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version, to compare with another's."""
    return tuple(int(part) for part in re.match(r"[0-9.]*", version)[0].split(".") if part)  # type: ignore[index]


def _client(scheme: str, requires: list[str]) -> Check:
    extra = EXTRAS[scheme]
    client = PACKAGES[extra]
    advice = f'pip install --upgrade "rlk-ledger[{extra}]"'
    try:
        there = importlib.metadata.version(client)
    except importlib.metadata.PackageNotFoundError:
        text = f"{client}, the client for {scheme}://, is not installed"
        return Check("store client", "fail", text, advice.replace("--upgrade ", ""))
    matches = (_NEEDED.match(line.partition(";")[0].strip()) for line in requires)
    least = next((match[2] for match in matches if match is not None and match[1] == client), "0")
    if numbers(there) < numbers(least):
        return Check("store client", "fail", f"{client} {there} for {scheme}:// is older than {least}", advice)
    return Check("store client", "ok", f"{client} {there} for {scheme}://")


VARIABLES = frozenset(
    (
        "RLK_ANCHOR",
        "RLK_BLOCK_MS",
        "RLK_BUDGET_BYTES",
        "RLK_CHECKPOINT_S",
        "RLK_CONSISTENCY",
        "RLK_DISABLE",
        "RLK_EXIT_S",
        "RLK_FAST",
        "RLK_GENERATE_FUNCTION_PATH",
        "RLK_LEDGER",
        "RLK_LINEAR_LOGP_PROVIDER_PATH",
        "RLK_ON_ERROR",
        "RLK_ON_MISSING",
        "RLK_PARENT_WRITER",
        "RLK_REDACTION",
        "RLK_REDACTION_KEY",
        "RLK_ROLE",
        "RLK_RUN_ID",
        "RLK_ATTEMPTS",
        "RLK_SCORER_PYTHON",
        "RLK_WEIGHTS_CACHE",
        "RLK_SHIPPER",
        "RLK_SIGNING_KEY",
        "RLK_SPOOL",
        "RLK_SUPERVISOR",
        "RLK_VLLM",
        "RLK_VLLM_WORKERS",
    )
)
"""Every variable that is read: any other RLK_ name is a slip, and a slip in RLK_LEDGER records nothing."""


def check_configuration(url: str | None) -> Iterator[Check]:
    """Whether init() would take what the environment says; and the keys it names."""
    try:
        config = load_config(url)
    except ConfigError as error:
        yield Check("configuration", "fail", str(error).removeprefix("init: "))
        return
    if os.environ.get("RLK_DISABLE") == "1":
        yield Check("configuration", "note", "RLK_DISABLE=1: nothing is recorded")
    elif config is None:
        yield Check("configuration", "note", "no ledger is named (RLK_LEDGER, --ledger): nothing would be recorded")
    else:
        text = f"run {'named' if os.environ.get('RLK_RUN_ID') else 'unnamed'}, shipper {config.shipper}"
        yield Check(
            "configuration", "ok", f"{text}, consistency {config.consistency}, redaction {config.redaction.mode}"
        )
    yield _signing(os.environ)
    for name in sorted(os.environ):
        if name.startswith("RLK_") and name not in VARIABLES:
            yield Check(
                "variable", "warn", f"{name} is set, and nothing reads it", nearest(name, tuple(sorted(VARIABLES)))
            )


def _signing(environment: Mapping[str, str]) -> Check:
    path = environment.get("RLK_SIGNING_KEY")
    there = importlib.util.find_spec("cryptography") is not None
    how = 'pip install "rlk-ledger[signing]"'
    if path and not there:
        return Check("signing", "fail", "RLK_SIGNING_KEY is set and `cryptography` is not installed", how)
    if path:
        try:
            mode = Path(path).stat().st_mode & 0o777
        except OSError as error:
            return Check(
                "signing", "fail", f"RLK_SIGNING_KEY: {path} cannot be read: {error.strerror}", "rlk-ledger keygen"
            )
        if not os.access(path, os.R_OK):
            return Check("signing", "fail", f"RLK_SIGNING_KEY: {path} is not readable by this user", "chown it")
        if mode & 0o077:
            return Check("signing", "warn", f"{path} has mode {mode:04o}: others can sign too", f"chmod 600 {path}")
        return Check("signing", "ok", f"receipts are signed with {path}")
    if there:
        return Check("signing", "note", "no RLK_SIGNING_KEY: each shipper signs with a key of its own")
    return Check("signing", "note", "`cryptography` is not installed: receipts are not signed", how)


def check_limits() -> Iterator[Check]:
    """Open files, file size, address space, shared memory, children."""
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if files != resource.RLIM_INFINITY and files < _LEAST_FILES:
        advice = f"ulimit -n {_LEAST_FILES}"
        yield Check("open files", "warn", f"{files} at most: a shipper opens one a writer", advice)
    else:
        yield Check("open files", "ok", f"{files if files >= 0 else 'any number'} at most")
    size = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    if size != resource.RLIM_INFINITY and size < LARGEST_FILE:
        advice = "ulimit -f unlimited"
        yield Check(
            "file size",
            "fail",
            f"files end at {size_text(size)}: spool files grow to {size_text(LARGEST_FILE)}",
            advice,
        )
    else:
        yield Check("file size", "ok", "files may be as large as spool files get")
    space = resource.getrlimit(resource.RLIMIT_AS)[0]
    if space != resource.RLIM_INFINITY:
        text = (
            f"{size_text(space)} of address space: each writer maps one spool file of up to {size_text(LARGEST_FILE)}"
        )
        yield Check("address space", "warn", text, "ulimit -v unlimited")
    else:
        yield Check("address space", "ok", "not limited")
    yield _shared_memory()
    method = multiprocessing.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0]
    text = f"{threading.active_count()} threads here, children start by {method}: each becomes a writer of its own"
    yield Check("children", "note", text)


def _shared_memory() -> Check:
    try:
        disk = os.statvfs("/dev/shm")
    except OSError:
        return Check("shared memory", "note", "there is no /dev/shm; recording does not use it, engines do")
    return Check(
        "shared memory", "note", f"{size_text(disk.f_bavail * disk.f_frsize)} of /dev/shm are free, for engines"
    )


def check_clock() -> Iterator[Check]:
    """Whether time passes alike on both clocks, and whether the kernel calls the wall clock synchronised."""
    wall, mono = time.time(), time.monotonic()
    time.sleep(0.1)
    drift = abs((time.time() - wall) - (time.monotonic() - mono))
    if time.monotonic() <= mono:
        yield Check("monotonic clock", "fail", "it does not move", "this machine cannot time anything")
    elif drift > 0.05:
        text = f"wall and monotonic clock drifted {1000 * drift:.0f} ms apart in 100 ms: it is being set"
        yield Check("monotonic clock", "warn", text, "wait until time synchronisation has settled")
    else:
        yield Check("monotonic clock", "ok", "wall and monotonic clock move together")
    yield _synchronised()


def _synchronised() -> Check:
    libc = ctypes.CDLL(None, use_errno=True)
    block = (ctypes.c_char * 512)()  # struct timex; modes, at its start, is 0: read only
    state = libc.adjtimex(ctypes.byref(block))
    if state < 0:
        return Check("clock synchronised", "note", "the kernel does not tell it here")
    # struct timex: u32 modes, (padding), long offset, freq, maxerror, esterror, int status
    status = ctypes.c_int.from_buffer(block, 8 + 4 * ctypes.sizeof(ctypes.c_long)).value
    if status & _UNSYNCHRONISED:
        text = "the kernel calls the wall clock unsynchronised (a guest's host may do it instead)"
        return Check("clock synchronised", "note", text, "run chrony or ntpd where wall times matter")
    return Check("clock synchronised", "ok", "the kernel calls the wall clock synchronised")


def check_container() -> Iterator[Check]:
    """Memory limit, pid namespace and process 1."""
    yield _memory(Path("/sys/fs/cgroup"))
    if os.readlink("/proc/self") != str(os.getpid()):  # noqa: PTH115
        text = "/proc shows another pid namespace: which writers live is told by their locks alone"
        yield Check("pid namespace", "warn", text, "mount /proc anew (unshare --mount-proc, bwrap --proc)")
        return
    first = (Path("/proc/1/comm").read_text().strip()) if Path("/proc/1/comm").exists() else "hidden"
    inside = os.getpid() != 1 and not _is_init(first)
    if inside:
        text = f"process 1 is `{first}`: when it ends, the shipper ends with this container"
        yield Check("pid namespace", "note", text, "`rlk-ledger run -- CMD` as its command waits for the shipper")
    else:
        yield Check("pid namespace", "ok", f"process 1 is `{first}`")


def _is_init(name: str) -> bool:
    return name in ("systemd", "init", "rlk-ledger") or name.startswith(("runit", "s6-", "openrc"))


def _memory(root: Path) -> Check:
    """The cgroup's limit (v2, then v1), and what is left of it."""
    pairs = (("memory.max", "memory.current"), ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"))
    for limit_file, used_file in pairs:
        try:
            limit, used = (root / limit_file).read_text().strip(), int((root / used_file).read_text())
        except (OSError, ValueError):
            continue
        if limit == "max" or int(limit) > 1 << 60:
            return Check("container memory", "ok", "not limited")
        room = int(limit) - used
        text = f"{size_text(max(room, 0))} of {size_text(int(limit))} are free, page cache of the spool counted in"
        if room < _LEAST_MEMORY:
            return Check("container memory", "warn", text, "a shipper takes a few hundred MB")
        return Check("container memory", "ok", text)
    if sys.platform != "linux":
        return Check("container memory", "unknown", "limits are read from Linux control groups only")
    return Check("container memory", "note", "no control group limits are shown here")
