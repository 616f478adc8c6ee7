"""One scorer's process from the outside: started, waited for, ended at its deadline, its answer checked.

Never forked from this process: an engine starts from a fresh interpreter, in a session of its own, so that ending it
ends whatever it started. Whatever happens in there is an answer here, never an exception.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from rlk_ledger_replay.scorers.protocol import (
    PROTOCOL,
    Failed,
    Frame,
    Guard,
    Job,
    Refused,
    Scored,
    Statement,
    read_frames,
    unpack,
    write_job,
)

POLL_S = 0.05
TAIL_LINES = 8
LINE_LENGTH = 300

Values = list[NDArray[np.float32]]


@dataclass(frozen=True)
class Problem:
    """Why a pass has no values: `error` while it was attempted, `not_measured` where it could not be attempted."""

    status: Literal["error", "not_measured"]
    reason: str


@dataclass
class Answer:
    """What one process gave. Every pass of the job is in exactly one of `values` and `problems`.

    values: by pass and sequence, float32 nats of the response tokens. guards, seconds: by pass that has values.
    """

    statement: Statement | None = None
    values: dict[str, Values] = field(default_factory=dict)
    guards: dict[str, tuple[Guard, ...]] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    problems: dict[str, Problem] = field(default_factory=dict)
    elapsed: float = 0.0


def run_child(
    module: str, job: Job, *, python: str, timeout: float, advance: Callable[[int], None] = lambda _: None
) -> Answer:
    """Runs a job in a fresh process of the interpreter `python` and returns what it answered within `timeout` seconds.

    advance: called with the number of passes just answered.
    """
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="rlk-scorer-") as folder:
        files = [Path(folder) / name for name in ("job", "answer", "log")]
        write_job(job, files[0])
        files[1].touch()
        end = _run([python, "-m", module, *map(str, files[:2])], Path(folder), files, timeout, advance, job)
        answer = Answer(elapsed=time.monotonic() - started)
        wrong = _read(files[1], job, answer)
        _close(answer, job, wrong or end, files[2])
    return answer


def child_environment(threads: int) -> dict[str, str]:
    """This process's environment without any recording, with `threads` threads and no model hub."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RLK_")}
    wanted = {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
    return kept | wanted


def _run(
    command: list[str], folder: Path, files: list[Path], timeout: float, advance: Callable[[int], None], job: Job
) -> str | None:
    """Runs the command to its end; returns how it ended, None when well."""
    deadline = time.monotonic() + timeout
    environment = child_environment(job.threads)
    try:
        with files[2].open("wb") as log:
            process = subprocess.Popen(
                command,
                cwd=folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
    except OSError as error:
        return f"the interpreter {command[0]} cannot be started ({error.strerror})"
    try:
        shown = 0
        while process.poll() is None:
            if time.monotonic() > deadline:
                return f"it was ended after its {timeout:g} s; --scorer-timeout gives it more"
            done = _answered(files[1], len(job.passes))
            advance(done - shown)
            shown = done
            time.sleep(POLL_S)
        advance(_answered(files[1], len(job.passes)) - shown)
    finally:
        end_group(process)
    return ending(process.returncode)


def end_group(process: subprocess.Popen[bytes]) -> None:
    """Ends a process and everything it started in its session, at once."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def ending(code: int | None) -> str | None:
    if not code:
        return None
    if code == -signal.SIGKILL:
        return "it was killed by signal 9 (out of memory, or by someone)"
    if code < 0:
        with contextlib.suppress(ValueError):
            return f"it crashed with {signal.Signals(-code).name}"
        return f"it crashed with signal {-code}"
    return f"it ended with code {code}"


def _answered(file: Path, most: int) -> int:
    with contextlib.suppress(OSError, ValueError):
        return min(most, sum(isinstance(one, Scored | Refused) for one in read_frames(file.read_bytes())))
    return 0


def _read(file: Path, job: Job, answer: Answer) -> str | None:
    """Takes the frames into `answer`; returns what is wrong with them, None when nothing is."""
    wanted = {one.name for one in job.passes}
    try:
        for frame in read_frames(file.read_bytes()):
            wrong = _take(frame, job, wanted, answer)
            if wrong is not None:
                return wrong
    except (OSError, ValueError) as error:
        return str(error)
    return None


def _take(frame: Frame, job: Job, wanted: set[str], answer: Answer) -> str | None:
    if isinstance(frame, Failed):
        status: Literal["error", "not_measured"] = "error" if frame.kind == "error" else "not_measured"
        for name in wanted:
            answer.problems.setdefault(name, Problem(status, frame.reason))
    elif isinstance(frame, Statement):
        if frame.protocol != PROTOCOL:
            return f"it speaks protocol {frame.protocol}, this replay {PROTOCOL}: install the same rlk-ledger there"
        answer.statement = frame
    elif isinstance(frame, Scored | Refused):
        if frame.name not in wanted or frame.name in answer.values or frame.name in answer.problems:
            return f"it answered pass {frame.name!r}, which nobody asked for or which it had answered"
        if isinstance(frame, Refused):
            kind: Literal["error", "not_measured"] = "not_measured" if frame.kind == "unsupported" else "error"
            answer.problems[frame.name] = Problem(kind, frame.reason)
        else:
            _accept(frame, job, answer)
    return None


def _accept(frame: Scored, job: Job, answer: Answer) -> None:
    """Takes the values of a pass if they are as many as asked for and finite wherever they were."""
    layout = next(one.layout for one in job.passes if one.name == frame.name)
    try:
        values = unpack(frame.values, job.sequences)
    except ValueError as error:
        answer.problems[frame.name] = Problem("error", str(error))
        return
    scored = sorted({index for batch in layout.batches for index in batch})
    broken = sum(int((~np.isfinite(values[index])).sum()) for index in scored)
    if answer.statement is None:
        answer.problems[frame.name] = Problem("error", "it answered before it said what it is")
    elif broken:
        answer.problems[frame.name] = Problem("error", f"{broken} of its values are not finite")
    else:
        answer.values[frame.name] = values
        answer.guards[frame.name] = frame.guards
        answer.seconds[frame.name] = frame.seconds


def _close(answer: Answer, job: Job, end: str | None, log: Path) -> None:
    """Gives every pass that was not answered its reason: how the process ended, and the last lines of its log."""
    tail = _tail(log)
    absent = "No module named 'rlk_ledger" in tail or "No module named rlk_ledger" in tail
    for one in job.passes:
        if one.name in answer.values or one.name in answer.problems:
            continue
        if absent and answer.statement is None:
            reason = "rlk-ledger is not installed beside that engine: pip install 'rlk-ledger[replay]' there"
            answer.problems[one.name] = Problem("not_measured", reason)
        else:
            how = end or "it ended without an answer"
            answer.problems[one.name] = Problem("error", f"{how}; its output ends: {tail}" if tail else how)


def _tail(log: Path) -> str:
    try:
        lines = log.read_text(errors="replace").splitlines()
    except OSError:
        return ""
    kept = [line.strip()[:LINE_LENGTH] for line in lines if line.strip()]
    return " | ".join(kept[-TAIL_LINES:])
