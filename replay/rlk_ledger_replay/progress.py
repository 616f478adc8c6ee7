"""How far a replay is, told to whoever watches."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol


class Progress(Protocol):
    """Told how far a replay is."""

    def stage(self, name: str, total: int | None = None) -> None:
        """A stage begins; `total` counts its units, where known."""

    def advance(self, units: int) -> None:
        """So many units of the current stage are done."""


@dataclass
class Silent:
    """Progress nobody watches."""

    stages: list[str] = field(default_factory=list)

    def stage(self, name: str, total: int | None = None) -> None:
        """Keeps the name."""
        self.stages.append(name)

    def advance(self, units: int) -> None:
        """Nothing to show."""
