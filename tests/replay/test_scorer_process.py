"""A scorer's process from outside: whatever happens in there is an answer, and what was finished before it is kept."""

from __future__ import annotations

import os
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

from rlk_ledger_replay.scorers.child import Answer, child_environment, run_child
from rlk_ledger_replay.scorers.protocol import (
    LENGTH_BYTES,
    Done,
    Job,
    Layout,
    Pass,
    Refused,
    pack,
    read_frames,
    read_job,
    sequence,
    unpack,
    write_frame,
    write_job,
)

ENGINE = '''
"""An engine that answers -1, -2, ... and misbehaves in the second pass, as the job's settings say."""
import os, signal, sys, time
import numpy as np
from rlk_ledger_replay.scorers import protocol, serve

class Engine:
    def __init__(self, job):
        self.job, self.does = job, job.settings["does"]
        if self.does == "missing":
            import engine_nobody_has
        if self.does == "cannot open":
            raise MemoryError("no room for the weights")

    def statement(self):
        spoken = 99 if self.does == "another protocol" else protocol.PROTOCOL
        return protocol.Statement(engine="test", version="1", device="cpu", dtype="float32", protocol=spoken)

    def score(self, task):
        if task.name == "second":
            self.misbehave()
        values = [-1.0 - np.arange(one.scored, dtype=np.float32) for one in self.job.sequences]
        if task.name == "second" and self.does == "short":
            values[0] = values[0][:-1]
        if task.name == "second" and self.does == "nan":
            values[1][0] = np.nan
        return values, [protocol.Guard("fine", "passed", "as it should be")]

    def misbehave(self):
        if self.does == "raise":
            raise ValueError("the attention kernel\\nrefused")
        if self.does == "unsupported":
            raise protocol.Unsupported("no such path")
        if self.does == "crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        if self.does == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.does == "leave":
            print("the engine said goodbye", flush=True)
            os._exit(3)
        if self.does == "hang":
            child = os.fork()
            if child == 0:
                time.sleep(600)
            with open(self.job.settings["pids"], "w") as file:
                file.write(f"{os.getpid()} {child}")
            time.sleep(600)
        if self.does == "garbage":
            with open(sys.argv[2], "ab") as file:
                file.write((4).to_bytes(8, "little") + b"\\xff\\xfe\\xfd\\xfc")
            os._exit(0)
        if self.does == "cut":
            with open(sys.argv[2], "ab") as file:
                file.write((4000).to_bytes(8, "little") + b"half a frame")
            os._exit(0)

raise SystemExit(serve.main(Engine, "engine_nobody_has"))
'''


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of an importable module that is the engine above."""
    folder = tmp_path / "engines"
    folder.mkdir()
    (folder / "engine_of_this_test.py").write_text(textwrap.dedent(ENGINE))
    monkeypatch.setenv("PYTHONPATH", str(folder))
    return "engine_of_this_test"


def job(does: str, **settings: str) -> Job:
    sequences = (sequence([1, 2, 3, 4], 1), sequence([5, 6, 7], 2))
    layout = Layout("together", ((0, 1),))
    passes = (Pass("first", "prefill", layout), Pass("second", "decode", layout))
    return Job(
        engine="test",
        folder="/nowhere",
        weights=None,
        dtype="float32",
        mode="processed",
        sequences=sequences,
        passes=passes,
        settings={"does": does, **settings},
    )


def run(module: str, does: str, timeout: float = 120.0, **settings: str) -> Answer:
    return run_child(module, job(does, **settings), python=sys.executable, timeout=timeout)


def test_values_come_back_by_pass_and_sequence_with_their_guards(module: str) -> None:
    counted: list[int] = []
    answer = run_child(module, job("nothing"), python=sys.executable, timeout=120, advance=counted.append)
    assert answer.problems == {}
    assert answer.statement is not None
    assert answer.statement.engine == "test"
    for name in ("first", "second"):
        assert [row.tolist() for row in answer.values[name]] == [[-1.0, -2.0, -3.0], [-1.0]]
        assert [guard.name for guard in answer.guards[name]] == ["fine"]
    assert sum(counted) == 2


@pytest.mark.parametrize(
    ("does", "status", "told"),
    [
        ("raise", "error", "ValueError: the attention kernel refused"),
        ("unsupported", "not_measured", "no such path"),
        ("crash", "error", "crashed with SIGSEGV"),
        ("killed", "error", "killed by signal 9 (out of memory, or by someone)"),
        ("leave", "error", "ended with code 3; its output ends: the engine said goodbye"),
        ("short", "error", "3 values for 4 response tokens"),
        ("nan", "error", "1 of its values are not finite"),
        ("garbage", "error", "no frame of this protocol"),
        ("cut", "error", "ended without an answer"),
    ],
)
def test_a_pass_that_goes_wrong_has_its_reason_and_the_one_before_keeps_its_values(
    module: str, does: str, status: str, told: str
) -> None:
    answer = run(module, does)
    assert set(answer.values) == {"first"}
    assert set(answer.problems) == {"second"}
    assert answer.problems["second"].status == status
    assert told in answer.problems["second"].reason


def test_a_deadline_ends_the_process_and_what_it_started(module: str, tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    answer = run(module, "hang", timeout=15.0, pids=str(pids))
    assert answer.problems["second"].status == "error"
    assert "ended after its 15 s" in answer.problems["second"].reason
    assert set(answer.values) == {"first"}
    for pid in map(int, pids.read_text().split()):
        assert not alive(pid)


def alive(pid: int) -> bool:
    """Whether a process runs; a zombie of an init that reaps late does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.parametrize(
    ("does", "status", "told"),
    [
        ("missing", "not_measured", "No module named 'engine_nobody_has'"),
        ("cannot open", "error", "MemoryError: no room for the weights"),
        ("another protocol", "error", "speaks protocol 99"),
    ],
)
def test_an_engine_that_does_not_open_leaves_every_pass_a_reason(
    module: str, does: str, status: str, told: str
) -> None:
    answer = run(module, does)
    assert answer.values == {}
    assert {name: one.status for name, one in answer.problems.items()} == {"first": status, "second": status}
    assert all(told in one.reason for one in answer.problems.values())


def test_an_interpreter_that_does_not_exist_is_said(module: str) -> None:
    answer = run_child(module, job("nothing"), python="/nowhere/python", timeout=10)
    assert "/nowhere/python cannot be started" in answer.problems["first"].reason


def test_an_interpreter_without_this_package_says_what_to_install(tmp_path: Path) -> None:
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S -E "$@"\n')
    bare.chmod(0o755)
    answer = run_child("rlk_ledger_replay.scorers.reference", job("nothing"), python=str(bare), timeout=60)
    assert {one.status for one in answer.problems.values()} == {"not_measured"}
    assert "rlk-ledger is not installed beside that engine" in answer.problems["first"].reason


def test_the_child_neither_records_nor_reaches_a_model_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLK_LEDGER", "somewhere")
    found = child_environment(3)
    assert not [name for name in found if name.startswith("RLK_")]
    assert (found["OMP_NUM_THREADS"], found["HF_HUB_OFFLINE"]) == ("3", "1")
    assert found["PATH"] == os.environ["PATH"]


def test_a_job_survives_the_file_and_another_protocol_does_not(tmp_path: Path) -> None:
    file = tmp_path / "job"
    write_job(job("nothing"), file)
    assert read_job(file) == job("nothing")
    data = file.read_bytes()
    file.write_bytes(data[:-1])
    with pytest.raises(ValueError, match="holds no scoring job"):
        read_job(file)
    file.write_bytes(data.replace(b"protocol\x01", b"protocol\x02"))
    with pytest.raises(ValueError, match="protocol 2, this rlk-ledger speaks 1"):
        read_job(file)


def test_frames_cut_anywhere_yield_the_whole_ones(tmp_path: Path) -> None:
    frames = [Refused("a", "error", "why"), Refused("b", "unsupported", "because"), Done()]
    file = tmp_path / "answer"
    ends = [0]
    for frame in frames:
        with file.open("ab") as out:
            write_frame(frame, out)
        ends.append(file.stat().st_size)
    data = file.read_bytes()
    for cut in range(len(data) + 1):
        assert list(read_frames(data[:cut])) == frames[: sum(end <= cut for end in ends[1:])]
    assert ends[1] > LENGTH_BYTES


def test_values_are_exact_and_their_number_is_checked() -> None:
    sequences = [sequence([1, 2, 3], 1), sequence([4, 5], 1)]
    rows = [np.array([-0.1, -1e-30], np.float32), np.array([np.nan], np.float32)]
    back = unpack(pack(rows), sequences)
    assert [a.tobytes() for a in back] == [a.tobytes() for a in rows]
    with pytest.raises(ValueError, match="2 values for 3 response tokens"):
        unpack(pack(rows[:1]), sequences)
