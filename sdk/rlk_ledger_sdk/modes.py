"""The mode in force in this process: fast x consistency, and what strict does with an incomplete sample.

An argument of init() wins over RLK_FAST, RLK_CONSISTENCY and RLK_ON_MISSING, which win over the defaults (off, audit,
quarantine). What a pair means is `rlk_ledger_schemas.modes.behaviour`; here is only which pair holds:

* RLK_DISABLE=1 puts consistency off; fast stays what it is, because it asks for operators, not for a record.
* Without a ledger audit has nowhere to report and is off. Strict stays strict: it is a demand on the samples, and a
  demand is never dropped because nobody writes it down.
* With consistency off nothing is recorded whatever fast says: operators are still chosen by fast, and what they
  decide is warned about or raised by whoever chooses them.
"""

import os
from collections.abc import Mapping
from typing import Any

import msgspec

from rlk_ledger_schemas.errors import ConfigError
from rlk_ledger_schemas.modes import (
    CONSISTENCY,
    FAST,
    ON_MISSING,
    Behaviour,
    Consistency,
    Fast,
    OnMissing,
    behaviour,
)
from rlk_ledger_sdk.choices import choice, env

VARIABLES = {"fast": "RLK_FAST", "consistency": "RLK_CONSISTENCY", "on_missing": "RLK_ON_MISSING"}


class Mode(msgspec.Struct, frozen=True, kw_only=True):
    """`fast`, `consistency` and `on_missing` (quarantine, fail, downgrade) of one process."""

    fast: Fast = "off"
    consistency: Consistency = "audit"
    on_missing: OnMissing = "quarantine"

    @property
    def behaviour(self) -> Behaviour:
        """What this pair means, by the precedence rule."""
        return behaviour(self.fast, self.consistency)

    @property
    def pair(self) -> dict[str, str]:
        """{fast, consistency}, as events hold it."""
        return {"fast": self.fast, "consistency": self.consistency}


OFF = Mode(consistency="off")
DEFAULTS = Mode()


def disabled() -> bool:
    """Whether RLK_DISABLE turns recording off."""
    return os.environ.get("RLK_DISABLE", "").strip().lower() not in ("", "0", "false", "no")


def load_mode(mode: Any = None, on_missing: Any = None, environ: Mapping[str, str] | None = None) -> Mode:
    """The mode asked for by arguments and environment (default: os.environ); raises ConfigError for any other word."""
    if mode is not None and not isinstance(mode, Mapping):
        raise ConfigError(f"init: mode must be a mapping, got {type(mode).__name__}.")
    given: dict[Any, Any] = dict(mode or {})
    unknown = [key for key in given if key not in ("fast", "consistency")]
    if unknown:
        raise ConfigError(f"init: mode has no key {unknown[0]!r}; its keys are fast and consistency.")
    given["on_missing"] = on_missing
    known = {"fast": FAST, "consistency": CONSISTENCY, "on_missing": ON_MISSING}
    names = {"fast": "mode fast", "consistency": "mode consistency", "on_missing": "on_missing"}
    chosen: dict[str, Any] = {}
    for field, words in known.items():
        value = given.get(field)
        if value is None:
            value = env(VARIABLES[field], environ)
        chosen[field] = getattr(DEFAULTS, field) if value is None else choice(names[field], value, words)
    return Mode(**chosen)


def in_force(asked: Mode, has_ledger: bool) -> Mode:
    """What holds of the mode asked for, given whether there is a ledger to record into."""
    if disabled() or (not has_ledger and asked.consistency != "strict"):
        return msgspec.structs.replace(asked, consistency="off")
    return asked


def from_environment() -> Mode:
    """The mode of a process that has not called init(); raises ConfigError."""
    return in_force(load_mode(), env("RLK_LEDGER") is not None)


def exports(mode: Mode) -> dict[str, str]:
    """The variables with which a spawned child inherits `mode`."""
    return {name: getattr(mode, field) for field, name in VARIABLES.items()}


def missing_exports(mode: Mode) -> dict[str, str]:
    """Those of `exports` without which a child that starts from this environment would be in another mode.

    Consistency counts only where the child would record: without RLK_LEDGER, and with RLK_DISABLE, it does not.
    """
    out = {}
    for field, name in VARIABLES.items():
        if field == "consistency" and (disabled() or env("RLK_LEDGER") is None) and mode.consistency == "off":
            continue
        value = getattr(mode, field)
        if (env(name) or getattr(DEFAULTS, field)) != value:
            out[name] = value
    return out
