"""Every factor there is: the files of this folder, then entry points of `rlk_ledger.factors`."""

from __future__ import annotations

import pkgutil
from importlib import import_module
from importlib.metadata import entry_points

import rlk_ledger_replay.factors
from rlk_ledger_replay.factors.factor import Factor
from rlk_ledger_schemas.errors import UsageError

GROUP = "rlk_ledger.factors"


def factors() -> tuple[Factor, ...]:
    """All factors, by id. Raises UsageError for a plugin that defines none or takes an id that is taken."""
    found: dict[str, Factor] = {}
    package = rlk_ledger_replay.factors
    for module in pkgutil.iter_modules(package.__path__):
        factor = getattr(import_module(f"{package.__name__}.{module.name}"), "FACTOR", None)
        if factor is not None:
            found[factor.factor] = factor
    for point in entry_points(group=GROUP):
        factor = point.load()
        if not isinstance(factor, Factor):
            raise UsageError(f"entry point {point.name!r} of {GROUP} is no Factor; let it name a module's FACTOR.")
        if factor.factor in found:
            raise UsageError(f"factor {factor.factor!r} of entry point {point.name!r} exists already; rename it.")
        found[factor.factor] = factor
    return tuple(found[name] for name in sorted(found))
