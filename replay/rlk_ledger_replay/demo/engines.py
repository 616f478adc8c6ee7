"""The two engine processes, supervised: both end well, or the one that failed is quoted and the other is stopped."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path

from rlk_ledger_replay.demo.exchange import POLL_S, step_file
from rlk_ledger_replay.demo.settings import Settings
from rlk_ledger_schemas.errors import RlkError

MODULES = {
    "rollout": "rlk_ledger_replay.demo.rollout",
    "training": "rlk_ledger_replay.demo.training",
}
TAIL_LINES = 15
GRACE_S = 5.0

Progress = Callable[[int], None]


class EngineFailed(RlkError):
    """One of the two engines ended with an error."""


def engine_environment(settings: Settings) -> dict[str, str]:
    """The environment of an engine: this process's, without any RLK_ setting that would change the recording."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RLK_")}
    return kept | {"OMP_NUM_THREADS": str(settings.threads), "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}


def run_engines(settings: Settings, settings_file: Path, progress: Progress) -> None:
    """Runs both engines to their end; `progress` is told how many steps are sampled and learned (0 to 2 x steps).

    Raises EngineFailed with the tail of its log when one of them fails.
    """
    with ExitStack() as stack:
        running = {side: _start(side, settings, settings_file, stack) for side in MODULES}
        while any(process.poll() is None for process in running.values()):
            progress(_steps_done(settings))
            _raise_failed(running, settings)
            time.sleep(POLL_S)
        _raise_failed(running, settings)
        progress(_steps_done(settings))


def log_file(settings: Settings, side: str) -> Path:
    """Where an engine's output goes."""
    return settings.work / f"{side}.log"


def _start(side: str, settings: Settings, settings_file: Path, stack: ExitStack) -> "subprocess.Popen[bytes]":
    log = stack.enter_context(log_file(settings, side).open("wb"))
    process = subprocess.Popen(
        [sys.executable, "-m", MODULES[side], str(settings_file)],
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        env=engine_environment(settings),
    )
    stack.callback(_stop, process)
    return process


def _stop(process: "subprocess.Popen[bytes]") -> None:
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _steps_done(settings: Settings) -> int:
    """Steps sampled plus steps learned from, by the files that prove them."""
    sampled = sum(step_file(settings.work, step).exists() for step in range(settings.steps))
    return sampled + sum(settings.weights(step + 1).exists() for step in range(settings.steps))


def _raise_failed(running: "Mapping[str, subprocess.Popen[bytes]]", settings: Settings) -> None:
    for side, process in running.items():
        if process.poll():
            tail = log_file(settings, side).read_text(errors="replace").splitlines()[-TAIL_LINES:]
            raise EngineFailed(
                f"the {side} engine ended with code {process.returncode}; its log is {log_file(settings, side)} "
                "and ends:\n" + "\n".join(tail)
            )
