"""Every system call of the recorder and of the shipper fails once, in every way: nothing acknowledged is lost.

    python tools/syscall_faults.py recorder|shipper|clock [--every 1] [--dir DIR]

Compiles `syscall_faults.c` with gcc, runs itself with it preloaded and forks a process for each case: the k-th call
below the case's folder fails with EIO, ENOSPC, EDQUOT, EROFS or EINTR, before or after it was done, once, three times
or until the disk heals, or writes half of what it was given. What must hold is in `Recording.check` and
`Shipping.check`. `--every n` takes every n-th k. Prints one JSON object; ends with 1 at the first broken promise.
"""

import argparse
import ctypes
import errno
import itertools
import json
import logging
import mmap
import os
import shutil
import struct
import subprocess
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from rlk_ledger_schemas.errors import ConfigError
from rlk_ledger_sdk import api, budget, recorder, spool
from rlk_ledger_sdk.filesystem import Method
from rlk_ledger_sdk.testing import read_spool, unaccounted

SOURCE = Path(__file__).with_suffix(".c")
CALLS = ("open", "write", "pwrite", "read", "fdatasync", "fsync", "link", "rename", "ftruncate", "mmap", "fallocate")
EVERY_CALL = (1 << (len(CALLS) + 2)) - 1  # mkdir and unlink as well
NOT_DONE, DONE, SHORT = 0, 1, 2
FOREVER = -1


class Fault(NamedTuple):
    """What goes wrong: how often in a row, with which errno, and whether the call did its work all the same."""

    name: str
    error: int
    how: int = NOT_DONE
    times: int = 1


FAULTS = (
    Fault("EIO", errno.EIO),
    Fault("EIO, done all the same", errno.EIO, DONE),
    Fault("ENOSPC three times", errno.ENOSPC, times=3),
    Fault("ENOSPC until it heals", errno.ENOSPC, times=FOREVER),
    Fault("EDQUOT until it heals", errno.EDQUOT, times=FOREVER),
    Fault("EROFS until it heals", errno.EROFS, times=FOREVER),
    Fault("EIO until it heals", errno.EIO, times=FOREVER),
    Fault("EINTR", errno.EINTR),
    Fault("short writes", errno.EIO, SHORT, FOREVER),
)


class Library:
    """The preloaded library of this process."""

    def __init__(self) -> None:
        self._c: Any = ctypes.CDLL(None)
        self._c.faults_seen.restype = self._c.faults_fired.restype = ctypes.c_long
        self._c.faults_arm.argtypes = (
            *(ctypes.c_char_p, ctypes.c_uint, ctypes.c_long, ctypes.c_long, ctypes.c_int, ctypes.c_int),
        )
        self._c.faults_clock.argtypes = (ctypes.c_longlong,)

    def arm(self, below: Path, at: int, fault: Fault, mask: int = EVERY_CALL) -> None:
        """From the `at`-th call below `below` on, `fault` happens."""
        self._c.faults_arm(os.fsencode(below), mask, at, fault.times, fault.error, fault.how)

    def disarm(self) -> None:
        self._c.faults_disarm()

    def seen(self) -> int:
        return int(self._c.faults_seen())

    def fired(self) -> int:
        return int(self._c.faults_fired())

    def clock(self, seconds: float) -> None:
        """Moves CLOCK_REALTIME by this much from what it is."""
        self._c.faults_clock(int(seconds * 1e9))


class Shared:
    """Memory a forked case reports into: counters, and (writer, seq) of every record() that returned one."""

    SLOTS = 256

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, 64 + self.SLOTS * 24)
        self.next = 0

    def put(self, at: int, value: int) -> None:
        struct.pack_into("<q", self._memory, at * 8, value)

    def get(self, at: int) -> int:
        return int(struct.unpack_from("<q", self._memory, at * 8)[0])

    def acknowledge(self, writer: str, seq: int) -> None:
        struct.pack_into("<Q", self._memory, 64 + self.next * 24, seq + 1)
        self._memory[72 + self.next * 24 : 88 + self.next * 24] = bytes.fromhex(writer)
        self.next += 1

    def __iter__(self) -> Iterator[tuple[str, int]]:
        for at in range(64, 64 + self.SLOTS * 24, 24):
            (seq,) = struct.unpack_from("<Q", self._memory, at)
            if seq:
                yield self._memory[at + 8 : at + 24].hex(), seq - 1


SEEN, FIRED, ATTEMPTS, REFUSED = range(4)


def forked(work: Any) -> None:
    """Runs `work` in a forked process; raises AssertionError with its traceback when it raised or was killed."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.close(read)
            work()
            code = 0
        except BaseException:
            os.write(write, traceback.format_exc()[-3000:].encode())
        finally:
            os._exit(code)
    os.close(write)
    with os.fdopen(read) as said:
        text = said.read()
    status = os.waitpid(child, 0)[1]
    assert status == 0, f"the process ended with status {status}:\n{text}"


# -- the recorder ----------------------------------------------------------------------------------------------------


class Recording:
    """A job in production mode that rolls, flushes and errs while its disk fails, and goes on when it heals."""

    def __init__(self, library: Library, top: Path, method: Method) -> None:
        self.library = library
        self.top = top
        self.method = method

    def job(self, shared: Shared, at: int, fault: Fault) -> None:
        spool.FIRST_FILE, spool.LARGEST_FILE, spool.RESERVE = 16384, 32768, 4096
        budget.RETRY_S = 0.0
        recorder.method_for = lambda name: self.method
        logging.disable()
        self.library.arm(self.top, at, fault)
        try:
            api.init(
                str(self.top / "ledger"), run_id="r", spool=self.top / "spool", shipper="off", on_error="warn",
                block_ms=0,
            )  # fmt: skip
        except ConfigError:
            assert self.library.fired(), "init() refused a healthy disk"
            shared.put(REFUSED, 1)
            return
        for n in range(10):
            self._record(shared, n, 200 * n)
        api.record("knob.applied", path=1)
        api.flush("spooled")
        self._bulk(shared, 9000)
        self._bulk(shared, 300)
        shared.put(SEEN, self.library.seen())
        shared.put(FIRED, self.library.fired())
        self.library.disarm()
        for n in range(4):
            self._record(shared, n, 1500)
        shared.put(ATTEMPTS, 17)
        api.close(timeout=0)

    @staticmethod
    def _record(shared: Shared, n: int, size: int) -> None:
        reference = api.record("knob.applied", path="p", requested=n, status="applied", evidence="e" * size)
        if reference.writer_id is not None and reference.seq is not None:
            shared.acknowledge(reference.writer_id, reference.seq)

    @staticmethod
    def _bulk(shared: Shared, size: int) -> None:
        values = [-0.5] * size
        reference = api.record("logprobs", sample_id="s", source="rollout", contract_id="c", values=values)
        if reference.writer_id is not None and reference.seq is not None:
            shared.acknowledge(reference.writer_id, reference.seq)

    def case(self, at: int, fault: Fault) -> Shared:
        shared = Shared()
        shutil.rmtree(self.top, ignore_errors=True)
        self.top.mkdir(parents=True)
        forked(lambda: self.job(shared, at, fault))
        if not shared.get(REFUSED):
            self.check(shared)
        return shared

    def check(self, shared: Shared) -> None:
        """What record() returned for is there; every number is an event or in a gap; every loss is counted."""
        (directory,) = (d for d in (self.top / "spool").iterdir() if d.is_dir())
        image = read_spool(directory)
        stored = {(image.header.writer_id, event.seq) for event in image.events}
        acknowledged = list(shared)
        assert len(set(acknowledged)) == len(acknowledged), "one number was returned twice"
        assert not set(acknowledged) - stored, f"acknowledged and lost: {sorted(set(acknowledged) - stored)}"
        assert not unaccounted(image.events), f"numbers without an event or a gap: {unaccounted(image.events)}"
        gaps = [event.fields for event in image.events if event.type == "gap"]
        stated = sum(gap["last"] - gap["first"] + 1 for gap in gaps)
        own = [event for event in image.events if event.type in ("knob.applied", "logprobs")]
        assert len(own) == len(acknowledged), "an event is stored that record() did not return for"
        assert len(own) + stated == shared.get(ATTEMPTS), f"{len(own)} stored, {stated} stated as lost: {gaps}"
        assert image.events[-1].type == "writer.closed", "a disk that healed takes the closing event"
        assert [e.fields["requested"] for e in own[-4:]] == [0, 1, 2, 3], "what follows the healing is stored"


# -- the shipper -----------------------------------------------------------------------------------------------------


class Shipping:
    """A shipper and its bucket on a disk that fails: closed and dead writers, several files, a torn tail."""

    TORN = 20

    def __init__(self, library: Library, top: Path) -> None:
        self.library = library
        self.top = top
        self.template = top.with_name("template")
        spool.FIRST_FILE, spool.LARGEST_FILE, spool.RESERVE = 16384, 32768, 4096
        shutil.rmtree(self.template, ignore_errors=True)
        for closes in (True, False):
            forked(lambda closes=closes: self._writer(closes))
        self.written: Counter[tuple[str, int]] = Counter()
        self.torn = ""
        for directory in (d for d in (self.template / "spool").iterdir() if d.is_dir()):
            image = read_spool(directory)
            self.written.update((directory.name, event.seq) for event in image.events)
            if image.events[-1].type != "writer.closed":
                self.torn = directory.name
                self._tear(sorted(directory.glob("*.spool"))[-1])

    def _writer(self, closes: bool) -> None:
        """Records into the template, as if it were where a case has its folder."""
        api.init(str(self.top / "ledger"), run_id="r", spool=self.template / "spool", shipper="off")
        for n in range(12):
            api.record("knob.applied", path="p", requested=n, status="applied", evidence="e" * 300 * n)
        if closes:
            api.close(timeout=0)

    def _tear(self, path: Path) -> None:
        data = path.read_bytes()
        end = len(data.rstrip(b"\0")) + 32 & -8
        path.write_bytes(data[:end] + bytes(8) + b"z" * (self.TORN - 8) + data[end + self.TORN :])

    def job(self, shared: Shared, at: int, fault: Fault) -> None:
        from rlk_ledger.shipper import Shipper

        self.library.arm(self.top, at, fault)
        shipper = Shipper(self.top / "spool")
        for _ in range(3):
            shipper.cycle(flush=True)
        shared.put(SEEN, self.library.seen())
        shared.put(FIRED, self.library.fired())
        self.library.disarm()
        for _ in range(4):
            shipper.cycle(flush=True)
        assert not shipper.errors(), shipper.errors()
        shipper.close()

    def case(self, at: int, fault: Fault) -> Shared:
        shared = Shared()
        shutil.rmtree(self.top, ignore_errors=True)
        shutil.copytree(self.template, self.top)
        forked(lambda: self.job(shared, at, fault))
        forked(self.check)
        return shared

    def check(self) -> None:
        """Every event once, the torn bytes stated once, nothing left in the spool, nothing like an attack."""
        import rlk_ledger
        from rlk_ledger.verify import verify

        ledger = rlk_ledger.open(str(self.top / "ledger"))
        receipts = ledger.run("r").receipts
        shippers = {receipt.shipper for receipt in receipts}
        found = Counter((w, seq) for w, seq, _, _ in ledger.read_events("r") if w not in shippers)
        assert found == self.written, f"missing {self.written - found}, twice {found - self.written}"
        result = verify(str(self.top / "ledger"), deep=True)
        assert int(result.exit_code) == 3, f"verify: {result.findings}"
        kinds = {finding.kind for finding in result.findings}
        assert kinds <= {"bytes.lost", "writer.killed", "segment.garbage", "receipt.uncovered"}, kinds
        lost = [(w.writer_id, w.lost_bytes) for r in receipts for w in r.writers if w.dead]
        assert [writer for writer, _ in lost] == [self.torn], lost
        assert not list((self.top / "spool").glob("*/*.spool")), "a committed file is still in the spool"


def sweep(scene: "Recording | Shipping", every: int, faults: tuple[Fault, ...]) -> dict[str, int]:
    """Runs `scene` with every fault at every `every`-th call; returns how many calls, cases and faults there were."""
    total = scene.case(-1, Fault("none", 0, times=0)).get(SEEN)
    assert total > 10, f"only {total} calls were seen: is the library preloaded?"
    cases = fired = refused = 0
    for number, fault in enumerate(faults):
        for at in range(number % every, total, every):
            try:
                shared = scene.case(at, fault)
            except AssertionError as error:
                raise AssertionError(f"{fault.name} at call {at} of {total}: {error}") from None
            cases += 1
            fired += shared.get(FIRED)
            refused += shared.get(REFUSED)
    assert fired, "no fault happened"
    return {"calls": total, "cases": cases, "faults": fired, "refused_at_init": refused}


def clock(library: Library, top: Path) -> dict[str, int]:
    """The wall clock jumps by hours between and inside events: order and completeness do not depend on it."""
    import time

    from rlk_ledger.service import ship_once
    from rlk_ledger.verify import verify

    shutil.rmtree(top, ignore_errors=True)
    url, jumps = str(top / "ledger"), (0, -7200, 86_400, -86_400, 3 * 86_400, -10 * 365 * 86_400, 0)
    api.init(url, run_id="r", spool=top / "spool", shipper="off", on_error="raise")
    plain = recorder._wall

    def jumping() -> int:
        library.clock(jumps[(time.monotonic_ns() // 1000) % len(jumps)])
        return plain()

    recorder._wall = jumping
    for n in range(300):
        library.clock(jumps[n % len(jumps)])
        api.record("knob.applied", path="p", requested=n, status="applied")
        if n % 100 == 50:
            ship_once(top / "spool")
    api.close(timeout=0)
    assert not ship_once(top / "spool")
    import rlk_ledger

    events = sorted(((seq, event) for _, seq, event, _ in rlk_ledger.open(url).read_events("r")), key=lambda e: e[0])
    assert [seq for seq, _ in events] == list(range(len(events))), "a number is missing or there twice"
    order = [event["requested"] for _, event in events if event["type"] == "knob.applied"]
    assert order == list(range(300)), "order is the order of record()"
    stamps = [event["wall_ns"] for _, event in events]
    backwards = sum(b < a for a, b in itertools.pairwise(stamps))
    assert backwards > 20, "the clock did not jump"
    result = verify(url, deep=True)
    assert int(result.exit_code) == 0, result.findings
    assert not list((top / "spool").glob("*/*.spool"))
    return {"events": len(events), "steps_back": backwards}


def preloaded(arguments: list[str], top: Path) -> int:
    """Compiles the library and runs this script again with it."""
    library = top / "faults.so"
    subprocess.run(["gcc", "-shared", "-fPIC", "-O1", "-o", str(library), str(SOURCE), "-ldl"], check=True)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("RLK_", "PYTEST_"))}
    environment |= {"LD_PRELOAD": str(library), "RLK_TEST_TOP": str(top)}
    return subprocess.run([sys.executable, __file__, *arguments], env=environment, check=False).returncode


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("recorder", "shipper", "clock"))
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--dir", type=Path)
    options = parser.parse_args()
    if "RLK_TEST_TOP" not in os.environ:
        if options.dir is not None:
            return preloaded(sys.argv[1:], options.dir.absolute())
        with tempfile.TemporaryDirectory(prefix="faults-") as folder:
            return preloaded(sys.argv[1:], Path(folder))
    top, library = Path(os.environ["RLK_TEST_TOP"]) / "case", Library()
    try:
        if options.what == "recorder":
            methods: tuple[Method, ...] = ("mmap", "pwrite")
            said: dict[str, Any] = {m: sweep(Recording(library, top, m), options.every, FAULTS) for m in methods}
        elif options.what == "shipper":
            said = sweep(Shipping(library, top), options.every, FAULTS)
        else:
            said = clock(library, top)
    except AssertionError as error:
        print(f"BROKEN in {top}: {error}")
        return 1
    print(json.dumps(said))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
