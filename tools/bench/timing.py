"""What the benchmarks of single calls share: each call is timed alone, and the timer's own cost is known."""

import time
from collections.abc import Callable
from typing import Any


def times_ns(call: Callable[[], Any], count: int) -> list[int]:
    """The duration of each of `count` calls, the timer's cost included."""
    clock = time.perf_counter_ns
    out = []
    for _ in range(count):
        start = clock()
        call()
        out.append(clock() - start)
    return out


def timer_ns() -> int:
    """The median cost of timing a call that does nothing."""
    return sorted(times_ns(lambda: None, 20000))[10000]
