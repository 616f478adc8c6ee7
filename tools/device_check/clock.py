"""How long a call takes on a device: medians of events around it, caches emptied before it.

On CUDA the queue is given a delay first, so that the device and not Python decides; on a CPU the wall clock is read.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

_FLUSH_BYTES = 512 << 20
"""Ten times the second-level cache of a Hopper card; writing it also outlasts the launch of what is timed."""

_WARM_UPS = 3
_FEWEST = 5
_FEWEST_ON_CPU = 1


class Clock:
    """Times calls on one device; owns the buffer that empties its cache. timed: False where times mean nothing."""

    def __init__(self, device: str, repetitions: int = 30, budget_s: float = 2.0) -> None:
        """repetitions: at most so many timed calls. budget_s: a measurement ends after that long."""
        self.device = device
        self.timed = device == "cuda"
        self.repetitions = repetitions
        self.budget_s = budget_s
        self._flush = torch.empty(_FLUSH_BYTES if device == "cuda" else 1, dtype=torch.int8, device=device)

    def median_ms(self, call: Callable[[], object]) -> float:
        """Median milliseconds of `call` after warm-up."""
        return self._cuda_ms(call) if self.device == "cuda" else self._cpu_ms(call)

    def _cuda_ms(self, call: Callable[[], object]) -> float:
        for _ in range(_WARM_UPS):
            call()
        torch.cuda.synchronize()
        started, pairs = time.perf_counter(), []
        for done in range(self.repetitions):
            self._flush.zero_()
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            call()
            end.record()
            pairs.append((start, end))
            if done % _FEWEST == _FEWEST - 1:
                torch.cuda.synchronize()
                if time.perf_counter() - started > self.budget_s:
                    break
        torch.cuda.synchronize()
        return statistics.median(start.elapsed_time(end) for start, end in pairs)

    def _cpu_ms(self, call: Callable[[], object]) -> float:
        call()
        started, times = time.perf_counter(), []
        for done in range(self.repetitions):
            before = time.perf_counter()
            call()
            times.append((time.perf_counter() - before) * 1e3)
            if done + 1 >= _FEWEST_ON_CPU and time.perf_counter() - started > self.budget_s:
                break
        return statistics.median(times)
