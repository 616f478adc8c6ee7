"""Times of an engine: read from its timers or a profile, computation and communication apart, never made up."""

from types import SimpleNamespace
from typing import Any

import pytest

from rlk_ledger_sdk.integrations.megatron.place import Axis, Place
from rlk_ledger_sdk.integrations.megatron.timings import profiled, since_last

ALONE = Axis(0, 1)


def place(tp: int = 1) -> Place:
    return Place(0, tp, Axis(0, tp), ALONE, ALONE, ALONE, ALONE)


class Timer:
    """Megatron's timer as far as it is read."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def active_time(self) -> float:
        return self.seconds


def timers(**seconds: float) -> Any:
    return SimpleNamespace(_timers={name.replace("_", "-"): Timer(one) for name, one in seconds.items()})


def event(name: str, start: float, end: float, thread: int = 1, device: str = "CPU") -> Any:
    span = SimpleNamespace(start=start, end=end)
    return SimpleNamespace(name=name, time_range=span, thread=thread, device_type=f"DeviceType.{device}")


def profile(*events: Any) -> Any:
    return SimpleNamespace(events=lambda: list(events))


def test_a_timer_is_recorded_once_for_what_it_added() -> None:
    """Claim: the second reading holds the difference, and a timer that did not run gives nothing."""
    seen: dict[str, float] = {}
    held = timers(forward_compute=1.0, all_grads_sync=0.5)
    first = {f.get("operator") or f.get("collective"): f for f in since_last(held, seen, place())}
    assert first["forward-compute"]["compute_ns"] == 1_000_000_000
    assert first["all-grads-sync"]["exposed_ns"] == 500_000_000
    held._timers["forward-compute"].seconds = 1.25
    second = list(since_last(held, seen, place()))
    assert [(f["operator"], f["compute_ns"]) for f in second] == [("forward-compute", 250_000_000)]


@pytest.mark.parametrize(("tp", "field"), [(1, "compute_ns"), (2, "elapsed_ns")])
def test_computation_that_holds_collectives_is_not_called_computation(tp: int, field: str) -> None:
    """Claim: under tensor parallelism a forward timer spans all-reduces, so only what elapsed is said."""
    (fields,) = since_last(timers(forward_compute=2.0), {}, place(tp))
    times = {name for name in fields if name.endswith("_ns")}
    assert times == {field}


def test_timers_that_do_not_exist_give_nothing() -> None:
    """Claim: no timers, no events."""
    assert list(since_last(None, {}, place())) == []


def test_communication_is_overlapped_where_computation_ran_and_exposed_elsewhere() -> None:
    """Claim: 30 us of all-reduce of which 10 us ran beside a matmul are 10 overlapped and 20 exposed, on the host."""
    held = profile(
        event("pass", 0, 100),
        event("aten::mm", 0, 40),
        event("aten::add", 10, 20),
        event("gloo:all_reduce", 30, 60, thread=2),
        event("gloo:all_reduce", 200, 260, thread=2),
        event("aten::mm", 90, 120),
        event("aten::mm", 45, 55, thread=7),
    )
    compute, communicate = profiled(held, ["pass"])
    assert compute["operator"] == communicate["part_of"] == "pass"
    assert (compute["elapsed_ns"], compute["compute_ns"], compute["calls"]) == (100_000, 50_000, 1)
    assert (communicate["exposed_ns"], communicate["overlapped_ns"], communicate["calls"]) == (20_000, 10_000, 1)
    assert compute["clock"] == "host"


def test_a_device_range_takes_the_device_s_kernels() -> None:
    """Claim: with kernels in the profile the range is the device's, and host operators do not count as computation."""
    held = profile(
        event("pass", 0, 10),
        event("pass", 50, 150, device="CUDA"),
        event("aten::mm", 0, 10),
        event("gemm", 60, 100, device="CUDA"),
        event("Memcpy HtoD", 100, 110, device="CUDA"),
        event("ncclDevKernel_AllReduce", 90, 140, device="CUDA"),
    )
    compute, communicate = profiled(held, ["pass"])
    assert (compute["elapsed_ns"], compute["compute_ns"], compute["clock"]) == (100_000, 40_000, "device")
    assert (communicate["exposed_ns"], communicate["overlapped_ns"]) == (40_000, 10_000)


def test_a_range_without_its_device_side_is_not_split() -> None:
    """Claim: kernels run later than the host range that launched them; without the device's range nothing is split."""
    held = profile(event("pass", 0, 10), event("gemm", 60, 100, device="CUDA"))
    (fields,) = profiled(held, ["pass", "absent"])
    assert fields["elapsed_ns"] == 10_000
    assert "compute_ns" not in fields
