"""Claims: the device check runs end to end here, interpreted; a kernel that fails, hangs or breaks its process is a row
and the rest goes on; what there was no time for is a row that says so; its result is one document of one shape."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import torch
from device_check import clock, supervisor, work
from device_check.card import environment
from device_check.clock import Clock
from device_check.kept import Kept
from device_check.report import Report, Row, counts, file_name, judged, line, table, unmeasured
from device_check.supervisor import Worker, allotted, check
from device_check.work import SECTIONS, Item, items, run
from pretend_device import DEVICE, PretendDevice

from rlk_ledger_kernels.suite.catalogue import operators

TOOL = Path(work.__file__).parent


def test_the_check_runs_end_to_end_interpreted(tmp_path: Path) -> None:
    """Every section but the slow ones, of one operator; the document decodes strictly."""
    result = tmp_path / "result.json"
    command = [sys.executable, str(TOOL), "--interpret", "--quiet", "--operators", "embedding", "--json", str(result)]
    command += ["--sections", "rates", "build", "accuracy", "P12", "native", "torch on the device"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    report = msgspec.json.decode(result.read_bytes(), type=Report)
    assert (report.format, report.device, report.interpreted) == (1, "cpu", True)
    assert {"card", "torch", "triton", "python"} <= report.environment.keys()
    assert not [row for row in report.rows if row.state in ("failed", "missed")]
    by_section = {row.section for row in report.rows}
    assert {"rates", "P12"} <= by_section
    triton = next(row for row in report.rows if row.section == "P12" and row.name.startswith("triton"))
    assert (triton.state, triton.bar, triton.ratio is not None) == ("measured", 0.85, True)
    assert f"written to {result}" in done.stdout
    assert counts(report.rows) in done.stdout


def test_without_a_card_it_says_what_to_do() -> None:
    bare = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment = bare | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, str(TOOL)], capture_output=True, text=True, check=False, env=environment)
    assert (done.returncode, done.stdout) == (2, "")
    assert "torch sees no CUDA device; or run it here with --interpret, or build with --compile 90" in done.stderr


def test_every_kernel_of_every_operator_is_on_the_list() -> None:
    build, native = (next(one for one in SECTIONS if one.name == name) for name in ("build", "native"))
    listed = {item.operator for item in items(build, (), "cuda", "large")}
    assert listed == {one.name for one in operators().values() if any(b.name == "triton" for b in one.backends)}
    assert {item.backend for item in items(native, (), "cpu", "large")} == set(work.NATIVE)
    assert [item.operator for item in items(build, ("swiglu",), "cuda", "large")] == ["swiglu"]
    assert sum(section.share for section in SECTIONS) == pytest.approx(1.0)


def test_a_kernel_that_does_not_build_is_a_row_and_the_rest_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = import_module("rlk_ledger_kernels.ops.swiglu.torch")
    real, calls = backend.swiglu, iter([True])

    def broken(*operands: object) -> object:
        if next(calls, False):
            raise RuntimeError("PassManager::run failed\nat line 7")
        return real(*operands)

    monkeypatch.setattr(backend, "swiglu", broken)
    found = list(run(Item("accuracy", "swiglu", "torch", "small"), "cpu"))
    assert [row.state for row in found] == ["failed"] + ["passed"] * (len(found) - 1)
    assert found[0].detail == "RuntimeError: PassManager::run failed | at line 7"
    assert len(found) > 1


def test_a_kernel_that_computes_something_else_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(import_module("rlk_ledger_kernels.ops.swiglu.torch"), "swiglu", lambda gate, up, contract: gate)
    found = list(run(Item("torch on the device", "swiglu", "torch", "small"), "cpu"))
    accuracy = [row for row in found if row.name.endswith("accuracy")]
    assert accuracy
    assert {row.state for row in accuracy} == {"failed"}
    assert "tolerances away" in accuracy[0].detail


def worker(code: str) -> Worker:
    return Worker((sys.executable, "-u", "-c", f"import sys, time\nfor asked in sys.stdin:\n    {code}\n"))


ROW_LINE = """print('ROW {"section":"build","name":"one","state":"passed"}')"""


@pytest.fixture
def stopped() -> Iterator[list[Worker]]:
    started: list[Worker] = []
    yield started
    for one in started:
        one.stop()


@pytest.mark.parametrize(
    ("code", "limit_s", "ending"),
    [
        (f"print('noise'); {ROW_LINE}; print('DONE')", 60.0, None),
        (f"{ROW_LINE}; print('BROKEN AcceleratorError: illegal memory access')", 60.0, "illegal memory access"),
        (f"{ROW_LINE}; sys.stderr.write('out of memory'); sys.exit(9)", 60.0, "ended with 9: out of memory"),
        (f"{ROW_LINE}; time.sleep(600)", 1.0, "no answer within 1 s"),
    ],
    ids=["well", "broken device", "dead process", "hanging"],
)
def test_rows_survive_whatever_becomes_of_their_worker(
    stopped: list[Worker], code: str, limit_s: float, ending: str | None
) -> None:
    stopped.append(worker(code))
    answers = list(stopped[0].do(Item("build", "swiglu", "triton"), limit_s if ending is None else max(limit_s, 3.0)))
    assert answers[0] == Row(section="build", name="one", state="passed")
    assert len(answers) == (1 if ending is None else 2)
    assert ending is None or ending.replace("1 s", "3 s") in str(answers[1])


def test_after_a_dead_worker_the_next_item_gets_a_new_one(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[str, ...]] = []

    class Dying:
        def __init__(self, command: tuple[str, ...]) -> None:
            made.append(command)

        def do(self, item: Item, limit_s: float) -> Iterator[Row | str]:
            yield "the process ended with -11: nothing on its standard error"

        def stop(self) -> None:
            pass

    monkeypatch.setattr(supervisor, "Worker", Dying)
    told: list[Row] = []
    rows = check("cpu", "small", ("swiglu", "rms_norm"), ("build",), 100.0, told.append)
    assert rows == told
    assert [row.state for row in rows] == ["failed"] * len(rows)
    assert len(made) == len(rows) >= 2
    assert rows[0].detail.startswith("the process ended with -11")


def test_what_there_was_no_time_for_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = check("cpu", "small", (), (), -1.0, lambda row: None)
    assert {row.state for row in rows} == {"not measured"}
    assert {row.section for row in rows} == {section.name for section in SECTIONS}
    assert {row.detail for row in rows} == {"the section's time was used up"}


def test_an_item_gets_three_fair_shares_and_the_last_one_all() -> None:
    assert allotted(54.0, 13) == 12.0
    assert allotted(100.0, 4) == 50.0
    assert allotted(40.0, 1) == 40.0
    assert allotted(8.0, 5) == 8.0
    assert allotted(2.9, 1) == 0.0
    assert allotted(-1.0, 3) == 0.0


def test_a_bar_is_judged_only_where_time_means_something() -> None:
    assert judged("P13", "gemm", 0.71, 0.70, timed=True).state == "met"
    assert judged("P13", "gemm", 0.69, 0.70, timed=True).state == "missed"
    assert judged("P13", "gemm", 0.71, 0.70, timed=False).state == "measured"
    assert unmeasured("P12", "Liger", ModuleNotFoundError("no", name="liger_kernel")).state == "not measured"
    assert unmeasured("P12", "ours", ModuleNotFoundError("no", name="rlk_ledger_kernels.ops.x")).state == "failed"
    assert not Clock("cpu").timed


def test_the_table_names_every_row_and_the_file_its_card() -> None:
    rows = (
        judged("P12", "triton", 0.9, 0.85, timed=True, value=0.3, unit="ms"),
        Row(section="a", name="b", state="failed"),
    )
    facts = {"card": "NVIDIA H200", "driver": "570.86.15"}
    report = Report(format=1, device="cuda", interpreted=False, environment=facts, budget_s=225, seconds=180, rows=rows)
    shown = table(report)
    assert all(line(row) in shown for row in rows)
    assert shown.endswith("1 failed, 1 met in 180 of 225 s")
    assert file_name(facts) == "nvidia-h200-570.86.15.json"
    with pytest.raises(msgspec.ValidationError, match="unknown field"):
        msgspec.json.decode(msgspec.json.encode(report)[:-1] + b',"more":1}', type=Report)


def test_the_clock_takes_the_median_of_what_it_ran() -> None:
    calls: list[float] = []
    ms = Clock("cpu", repetitions=5, budget_s=60.0).median_ms(lambda: calls.append(time.perf_counter()))
    assert len(calls) == 6
    assert ms >= 0.0


def test_a_large_operand_crosses_once_while_nobody_writes_to_it() -> None:
    large, small = torch.ones(4 << 20), torch.ones(4)
    with PretendDevice(), Kept():
        first = large.to("cuda")
        assert large.to(DEVICE) is first
        assert small.to("cuda") is not small.to("cuda")
        assert large.to("cpu") is large
        large[0] = 2.0
        again = large.to("cuda")
        assert again is not first
        assert float(again[0]) == 2.0
        assert large.to("cuda", torch.bfloat16).dtype == torch.bfloat16


class Event:
    """What the clock asks of `torch.cuda.Event`; every call takes as many milliseconds as calls were made before it."""

    made = 0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.at, Event.made = Event.made, Event.made + 1

    def elapsed_time(self, end: Event) -> float:
        return float(end.at)


def test_the_clock_of_a_card_empties_the_cache_and_takes_the_median_of_its_events(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waited: list[int] = []
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: waited.append(1))
    monkeypatch.setattr(clock, "_FLUSH_BYTES", 64)
    calls: list[int] = []
    with PretendDevice():
        on_card = Clock("cuda", repetitions=7, budget_s=60.0)
        on_card._flush.fill_(1)
        ms = on_card.median_ms(lambda: calls.append(int(on_card._flush.sum())))
    assert ms == 7.0  # ends are 1, 3, ... 13
    assert on_card.timed
    assert calls == [64] * 3 + [0] * 7
    assert len(waited) == 3


def test_what_nvidia_smi_says_is_in_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text('#!/bin/sh\necho "570.86.15, 1980 MHz, 3201 MHz, 1980 MHz, 700.00 W, P0"\n')
    tool.chmod(0o755)
    about = SimpleNamespace(major=9, minor=0, multi_processor_count=132, total_memory=139 << 30)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: about)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    facts = environment("cuda")
    wanted = {"card": "NVIDIA H200", "driver": "570.86.15", "clocks.sm": "1980 MHz", "capability": "9.0"}
    assert wanted.items() <= facts.items()
    tool.write_text("#!/bin/sh\nexit 9\n")
    assert environment("cuda")["driver"] == "unknown"
    monkeypatch.setenv("PATH", "")
    assert environment("cuda")["driver"] == "unknown"


COMPILING = """
import sys
sys.path.insert(0, {tools!r})
import torch, triton, triton.language as tl
from device_check import compiled

@triton.jit
def double(x, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(x + at, tl.sum(tl.load(x + at)) * 2)

@triton.jit
def mistaken(x, N: tl.constexpr):
    tl.store(x + tl.arange(0, N), tl.no_such_function(N))

x = torch.ones(64)
one = compiled.Compiling(90)
double[(1,)](x, 64)
print(one.taken(), float(x[0]))
print(one.taken())
try:
    mistaken[(1,)](x, 64)
except Exception as error:
    print(type(error).__name__)
compiled.SHARED_BYTES[90] = 1
one = compiled.Compiling(90)
double[(1,)](x, 64)
print(one.taken()[0])
"""


def test_kernels_are_built_for_a_card_that_is_not_here(tmp_path: Path) -> None:
    """A kernel that is built, one that Triton refuses, and one that needs more than the card has."""
    script = tmp_path / "script.py"
    script.write_text(COMPILING.format(tools=str(TOOL.parent)))
    bare = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment = bare | {"TRITON_CACHE_DIR": str(tmp_path / "cache"), "TRITON_DEFAULT_FP_FUSION": "0"}
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=True, env=environment)
    built, nothing, refused, large = done.stdout.splitlines()
    assert re.fullmatch(r"\(None, '1 launches: double \d+ registers, 0 B of stack, \d+ B shared'\) 1\.0", built)
    assert (nothing, refused) == ("('no kernel was launched', '')", "CompilationError")
    assert re.fullmatch(r"double needs \d+ bytes of shared memory, the card has 1", large)


def test_the_check_builds_an_operator_for_hopper(tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    command = [sys.executable, str(TOOL), "--compile", "90", "--quiet", "--operators", "masked_mean"]
    done = subprocess.run([*command, "--json", str(result)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    report = msgspec.json.decode(result.read_bytes(), type=Report)
    assert report.environment["triton runs"] == "compiled for sm_90, not launched"
    assert report.rows
    assert {(row.section, row.state) for row in report.rows} == {("build", "passed")}
    assert all("registers" in row.detail for row in report.rows)
