"""`segment.timed` from what already measures: Megatron's own timers, or a torch.profiler that the job runs.

Nothing is timed here. Megatron's timers wait for the device when they start and stop, so what a communication timer
shows is time the rank spent waiting for it: exposed. A timer around computation also spans the collectives inside it
wherever a group has more than one rank; it is then recorded as `elapsed_ns`, never as computation.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from rlk_ledger_sdk.integrations.megatron.place import Place

_COMMUNICATION = ("-send", "-recv", "all-reduce", "all-gather", "reduce-scatter", "grads-sync")
_COMPUTATION = ("forward-compute", "backward-compute")
_BACKENDS = ("gloo:", "mpi:", "ucc:", "nccl")

Interval = tuple[float, float]


class Range(NamedTuple):
    """One occurrence of an event in a profile: [start, end) in us."""

    name: str
    start: float
    end: float
    thread: int
    device: bool


# -- Megatron's timers ------------------------------------------------------------------------------------------------


def since_last(timers: Any, seen: dict[str, float], place: Place) -> Iterator[Mapping[str, Any]]:
    """Fields of a `segment.timed` for every timer that ran since `seen` (name to seconds; brought up to date).

    `active_time` only ever grows, whatever the job's own logging resets: reading it changes nothing.
    """
    for name, timer in sorted(getattr(timers, "_timers", {}).items()):
        total = float(timer.active_time())
        spent = round((total - seen.get(name, 0.0)) * 1e9)
        seen[name] = total
        if spent > 0:
            yield {**_timer_fields(name, spent, place), "clock": "host", "evidence": "megatron.core.timers active_time"}


def _timer_fields(name: str, spent: int, place: Place) -> dict[str, Any]:
    whole = "forward-backward" if name.startswith(("forward-", "backward-")) and name != "forward-backward" else None
    if any(word in name for word in _COMMUNICATION):
        return {"collective": name, "part_of": whole, "exposed_ns": spent}
    alone = place.tp.size == place.cp.size == place.ep.size == 1
    if name in _COMPUTATION and alone:
        return {"operator": name, "part_of": whole, "compute_ns": spent}
    return {"operator": name, "part_of": whole, "elapsed_ns": spent}


# -- torch.profiler ---------------------------------------------------------------------------------------------------


def profiled(profile: Any, names: Sequence[str]) -> Iterator[Mapping[str, Any]]:
    """Fields of `segment.timed` for the record_function (or NVTX) ranges called `names` in a finished profile.

    Per range: one segment for its computation, and one for each collective inside it, whose time is `overlapped_ns`
    where computation ran meanwhile and `exposed_ns` where none did. On a device, ranges and kernels are the device's
    own; a range the profiler did not carry to the device has its host time only.
    """
    events = [_range(event) for event in profile.events()]
    on_device = any(event.device for event in events)
    for name in names:
        host = [event for event in events if event.name == name and not event.device]
        device = [event for event in events if event.name == name and event.device]
        if not host:
            continue
        if on_device and not device:
            elapsed = _length(_union(host))
            yield {"operator": name, "calls": len(host), "elapsed_ns": elapsed, **_source(False)}
        else:
            yield from _segments(name, device or host, [e for e in events if e.name not in names], bool(device))


def _segments(name: str, spans: list[Range], events: list[Range], device: bool) -> Iterator[Mapping[str, Any]]:
    inside = _union(spans)
    communication = [e for e in events if e.device == device and _communicates(e.name)]
    computation = [e for e in events if e.device == device and _computes(e, spans[0].thread)]
    busy = _both(_union(computation), inside)
    yield {
        "operator": name,
        "part_of": name,
        "calls": len(spans),
        "elapsed_ns": _length(inside),
        "compute_ns": _length(busy),
        **_source(device),
    }
    for collective in sorted({event.name for event in communication}):
        held = [event for event in communication if event.name == collective]
        calls = sum(bool(_both([(e.start, e.end)], inside)) for e in held)
        spent = _both(_union(held), inside)
        if not calls:
            continue
        overlapped = _length(_both(spent, busy))
        yield {
            "collective": collective,
            "part_of": name,
            "calls": calls,
            "exposed_ns": _length(spent) - overlapped,
            "overlapped_ns": overlapped,
            **_source(device),
        }


def _source(device: bool) -> dict[str, str]:
    return {"clock": "device" if device else "host", "evidence": "torch.profiler"}


def _range(event: Any) -> Range:
    span = event.time_range
    device = not str(event.device_type).endswith("CPU")
    return Range(str(event.name), float(span.start), float(span.end), int(event.thread), device)


def _communicates(name: str) -> bool:
    return name.lower().startswith(_BACKENDS)


def _computes(event: Range, thread: int) -> bool:
    """A kernel that is no copy on a device; an operator of the range's own thread on a host."""
    if event.device:
        return not _communicates(event.name) and not event.name.startswith(("Memcpy", "Memset"))
    return event.name.startswith("aten::") and event.thread == thread


# -- intervals --------------------------------------------------------------------------------------------------------


def _union(ranges: Iterable[Range]) -> list[Interval]:
    """Disjoint intervals in order."""
    out: list[Interval] = []
    for start, end in sorted((r.start, r.end) for r in ranges):
        if out and start <= out[-1][1]:
            out[-1] = (out[-1][0], max(out[-1][1], end))
        else:
            out.append((start, end))
    return out


def _both(left: list[Interval], right: list[Interval]) -> list[Interval]:
    """The common part of two lists of disjoint intervals in order."""
    out, i, j = [], 0, 0
    while i < len(left) and j < len(right):
        start, end = max(left[i][0], right[j][0]), min(left[i][1], right[j][1])
        if end > start:
            out.append((start, end))
        if left[i][1] < right[j][1]:
            i += 1
        else:
            j += 1
    return out


def _length(intervals: list[Interval]) -> int:
    """Nanoseconds of intervals in us."""
    return round(sum(end - start for start, end in intervals) * 1000)
