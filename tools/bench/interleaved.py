"""What recording adds to a job: interleaved passes with and without it, and a clock inside the recorder itself.

Two answers to one question. The pairs see everything (caches, garbage collection, the shipper on the other core) and
carry the machine's noise; the clock, in passes of its own, sees only the time spent in the recorder's own calls and
resolves far below it.
"""

import gc
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

BAR = 0.01
"""Share of the job's own time that recording may add."""
RESAMPLES = 10_000
CLOCKED = 20
"""Passes on the clock."""
FEWEST = 20
"""Pairs below which nothing is said about the bar."""


class Spent(NamedTuple):
    """Seconds of one pass: processor time of this process, and wall time."""

    cpu: float
    wall: float


class Side(NamedTuple):
    """One way of running a pass: `prepare` is not timed, `run` is."""

    prepare: Callable[[], Any]
    run: Callable[[], Any]


class Share(NamedTuple):
    """A share added by recording, with its 95 % interval over `count` observations."""

    value: float
    low: float
    high: float
    count: int

    @property
    def verdict(self) -> str:
        """What the interval says about the bar."""
        if self.count < FEWEST:
            return "too few passes"
        if self.high <= BAR:
            return "within the bar"
        return "ABOVE the bar" if self.low > BAR else "not resolvable here"


class Clock:
    """Thread processor time spent under `inside`, without what runs under `outside` in there. For one thread.

    It counts during `reading` only, its own cost (about a microsecond a call) included.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self.counts = False
        self._running = False
        self._since = 0.0

    def reading(self, side: Side) -> tuple[float, Spent]:
        """Runs one pass on the clock: (seconds inside, the pass)."""
        self.seconds, self.counts = 0.0, True
        try:
            spent = spent_by(side)
        finally:
            self.counts = False
        return self.seconds, spent

    def inside(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """`call`, counted."""
        return self._timed(call, True)

    def outside(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """`call`, not counted where it is called from something that is."""
        return self._timed(call, False)

    def _timed(self, call: Callable[..., Any], running: bool) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            if not self.counts:
                return call(*args, **kwargs)
            before = self._switch(running)
            try:
                return call(*args, **kwargs)
            finally:
                self._switch(before)

        return timed

    def _switch(self, running: bool) -> bool:
        now = time.thread_time()
        before = self._running
        if before:
            self.seconds += now - self._since
        self._running, self._since = running, now
        return before


@dataclass
class Pairs:
    """Interleaved passes, and passes on the clock: (seconds inside the recorder, the pass)."""

    off: list[Spent] = field(default_factory=list)
    on: list[Spent] = field(default_factory=list)
    clocked: list[tuple[float, Spent]] = field(default_factory=list)

    def added(self, what: str) -> Share:
        """The median over pairs of on / off - 1 for `cpu` or `wall`, with a bootstrap interval over pairs."""
        ratios = [getattr(on, what) / getattr(off, what) - 1 for off, on in zip(self.off, self.on)]
        return bootstrapped(ratios)

    @property
    def inside_share(self) -> Share:
        """The clock's seconds over the processor time of the same pass without them, with a bootstrap interval."""
        return bootstrapped([inside / (spent.cpu - inside) for inside, spent in self.clocked])

    @property
    def inside_s(self) -> float:
        """The median of the clock's seconds a pass."""
        return statistics.median(inside for inside, _ in self.clocked)


def bootstrapped(values: list[float], seed: int = 0) -> Share:
    """The median of `values` and the percentile interval of the median over resamples."""
    draw = random.Random(seed)
    medians = sorted(statistics.median(draw.choices(values, k=len(values))) for _ in range(RESAMPLES))
    low, high = medians[int(0.025 * RESAMPLES)], medians[int(0.975 * RESAMPLES)]
    return Share(statistics.median(values), low, high, len(values))


def interleave(off: Side, on: Side, clock: Clock, pairs: int, warm_up: int = 2) -> Pairs:
    """Runs `pairs` pairs of passes, the order inside each pair by a coin, then some passes of `on` on the clock."""
    coin, found = random.Random(7), Pairs()
    for _ in range(warm_up):
        for side in (off, on):
            spent_by(side)
    for _ in range(pairs):
        for side in (off, on) if coin.random() < 0.5 else (on, off):
            (found.on if side is on else found.off).append(spent_by(side))
    found.clocked = [clock.reading(on) for _ in range(CLOCKED)]
    return found


def spent_by(side: Side) -> Spent:
    """Runs one pass; garbage is collected before it."""
    side.prepare()
    gc.collect()
    cpu, wall = time.process_time(), time.perf_counter()
    side.run()
    return Spent(time.process_time() - cpu, time.perf_counter() - wall)


def processor_seconds(call: Callable[[], Any]) -> float:
    """Processor seconds of one call."""
    before = time.process_time()
    call()
    return time.process_time() - before


def shipper_cpu(spool: Path) -> float:
    """Processor seconds so far of the shipper process that serves `spool`; 0 where there is none."""
    total = 0
    for entry in Path("/proc").iterdir():
        try:
            if str(spool).encode() in (entry / "cmdline").read_bytes().split(b"\0"):
                fields = (entry / "stat").read_text().rpartition(") ")[2].split()
                total += int(fields[11]) + int(fields[12])
        except (OSError, IndexError, ValueError):
            continue
    return total / 100


def told(title: str, found: Pairs, samples: int, tokens: int, notes: dict[str, str]) -> dict[str, Any]:
    """Prints the table of one job and returns it as a document. samples, tokens: recorded per pass."""
    off_cpu = statistics.median(one.cpu for one in found.off)
    inside = found.inside_s
    print(f"{title}: {len(found.on)} pairs, {samples} samples and {tokens} tokens a pass of {off_cpu:.2f} CPU s")
    rows = {"CPU of the process": found.added("cpu"), "wall": found.added("wall")}
    rows["inside the recorder"] = found.inside_share
    for name, share in rows.items():
        interval = f"[{share.low * 100:.2f}, {share.high * 100:.2f}]"
        print(f"  {name:<22}{share.value * 100:7.2f} % {interval:>16}   bar {BAR * 100:g} %: {share.verdict}")
    print(f"  {'':<22}{inside / samples * 1e6:7.1f} us a sample, {inside / tokens * 1e6:.2f} us a token")
    for name, note in notes.items():
        print(f"  {name:<22}{note}")
    return {
        "title": title,
        "pairs": len(found.on),
        "samples": samples,
        "tokens": tokens,
        "off_cpu_s": off_cpu,
        "inside_us_per_sample": inside / samples * 1e6,
        "share": {name: share._asdict() for name, share in rows.items()},
        "bar": BAR,
        "notes": notes,
        "passes": {"off": found.off, "on": found.on, "clocked": found.clocked},
    }
