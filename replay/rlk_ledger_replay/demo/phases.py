"""What a person sees while the demo runs: one line a phase, a progress bar on a terminal, plain lines elsewhere."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.text import Text


class Phase:
    """One running phase: the demo's bar, which also serves a replay as its progress."""

    def __init__(self, progress: Progress, task: TaskID, name: str) -> None:
        self._progress = progress
        self._task = task
        self._name = name
        self.line = ""

    def reach(self, done: float, total: float) -> None:
        """Sets the bar to `done` of `total`."""
        self._progress.update(self._task, completed=done, total=total)

    def stage(self, name: str, total: int | None = None) -> None:
        """Begins a part of the phase with its own bar; without a total it only moves."""
        self._progress.reset(self._task, total=total, description=f"{self._name}: {name}")

    def advance(self, units: int) -> None:
        """Moves the bar on."""
        self._progress.advance(self._task, units)

    def note(self, line: str) -> None:
        """What the phase's line says when it is done."""
        self.line = line


class Phases:
    """Prints phases to `console`; `timings` holds the seconds of each finished one, in order."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.timings: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str, doing: str) -> Iterator[Phase]:
        """Runs the body as phase `name`; on a terminal `doing` and a bar are shown meanwhile."""
        started = time.perf_counter()
        progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            BarColumn(24),
            TimeElapsedColumn(),
            console=self.console,
            transient=True,
            disable=not self.console.is_terminal,
        )
        with progress:
            phase = Phase(progress, progress.add_task(f"{name}: {doing}", total=None), name)
            yield phase
        self.timings[name] = time.perf_counter() - started
        self.say(f"{name:<8} {self.timings[name]:5.1f} s  {phase.line}")

    def say(self, text: str = "", style: str = "") -> None:
        """Prints one line as it is, styled on a terminal only."""
        self.console.print(Text(text, style=style), soft_wrap=True)
