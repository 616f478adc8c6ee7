"""The scorer's process: open the engine, answer pass after pass, each as soon as it is done.

`python -m rlk_ledger_replay.scorers.<engine> JOB ANSWER` ends here. An exception is an answer too; only a crash is not.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO

from rlk_ledger_replay.scorers.protocol import (
    Done,
    Engine,
    Failed,
    Job,
    Pass,
    Refused,
    Scored,
    Unsupported,
    pack,
    read_job,
    write_frame,
)

_PR_SET_PDEATHSIG = 1
REASON_LENGTH = 2000


def main(open_engine: Callable[[Job], Engine], package: str, arguments: Sequence[str] | None = None) -> int:
    """Answers the job named on the command line; returns the exit code, 0 when every pass was answered.

    package: the engine's own package, whose absence is a missing engine rather than an error.
    """
    job_file, answer_file = (Path(name) for name in (sys.argv[1:] if arguments is None else arguments))
    die_with_parent()
    with answer_file.open("ab") as answer:
        try:
            job = read_job(job_file)
            engine = open_engine(job)
            statement = engine.statement()
        except ModuleNotFoundError as error:
            missing = (error.name or "").partition(".")[0] == package
            write_frame(Failed("missing" if missing else "error", told(error)), answer)
            return 1
        except Unsupported as error:
            write_frame(Failed("unsupported", str(error)), answer)
            return 1
        except Exception as error:
            write_frame(Failed("error", told(error)), answer)
            return 1
        write_frame(statement, answer)
        for task in job.passes:
            _answer(engine, task, answer)
        write_frame(Done(), answer)
    return 0


def die_with_parent() -> None:
    """Asks the kernel to end this process when the one that started it is gone (Linux; elsewhere nothing happens)."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() == 1:  # it was gone before the kernel was asked
        os._exit(1)


def told(error: BaseException) -> str:
    """An error as one line of bounded length."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return text if len(text) <= REASON_LENGTH else f"{text[:REASON_LENGTH]} ..."


def _answer(engine: Engine, task: Pass, answer: BinaryIO) -> None:
    started = time.monotonic()
    try:
        values, guards = engine.score(task)
        data = pack(values)
    except Unsupported as error:
        write_frame(Refused(task.name, "unsupported", str(error)), answer)
    except Exception as error:
        write_frame(Refused(task.name, "error", told(error)), answer)
    else:
        seconds = time.monotonic() - started
        write_frame(Scored(name=task.name, values=data, guards=tuple(guards), seconds=seconds), answer)
