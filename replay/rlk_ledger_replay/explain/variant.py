"""A variant: one way in which a side may compute otherwise than it declares, as data.

A variant changes fields of the declared numerics, or scores with other weights, or reads another token's value, or
rewrites values after scoring. It is scored by the same decoder as the declaration it departs from.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Need = Literal["experts", "kept_mass", "versions", "dense"]
"""What a variant cannot do without: a model with experts or without, recorded kept mass, a second weight version."""


@dataclass(frozen=True)
class Variant:
    """One departure from what a side declares.

    name: stable, unique. factor: the factor it belongs to. changes: numerics fields it sets. predicts: what the values
    look like if it is the cause. declared_by: (contract kind, field) pairs, one of which says what the side should run;
    a departure from what nobody declared is a choice of that engine, not a fault. Empty: always declared.
    needs: prerequisites. version: index of the weights it scores with. before: score each token with the version
    before its own. lag: it reads the value of the token so many places later. round_to: dtype the result is rounded
    to. kept: subtracts the log of the recorded kept probability.
    """

    name: str
    factor: str
    predicts: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    declared_by: tuple[tuple[str, str], ...] = ()
    needs: tuple[Need, ...] = ()
    version: int | None = None
    before: bool = False
    lag: int = 0
    round_to: str | None = None
    kept: bool = False

    def with_(self, other: Variant) -> Variant | None:
        """Both departures at once; None where they contradict each other."""
        shared = self.changes.keys() & other.changes.keys()
        if any(self.changes[name] != other.changes[name] for name in shared):
            return None
        weights = [one for one in (self, other) if one.version is not None or one.before]
        rewrites = [one for one in (self, other) if one.lag or one.round_to or one.kept]
        if len(weights) == 2 or len(rewrites) == 2:
            return None
        return Variant(
            name=f"{self.name} + {other.name}",
            factor=f"{self.factor} + {other.factor}",
            predicts=f"{self.predicts}; {other.predicts}",
            changes={**self.changes, **other.changes},
            declared_by=tuple(dict.fromkeys((*self.declared_by, *other.declared_by))),
            needs=tuple(dict.fromkeys((*self.needs, *other.needs))),
            version=self.version if self.version is not None else other.version,
            before=self.before or other.before,
            lag=self.lag or other.lag,
            round_to=self.round_to or other.round_to,
            kept=self.kept or other.kept,
        )
