"""Settings that are one of a few words: from an argument or a variable, and one sentence for any other word."""

import os
from collections.abc import Mapping, Sequence
from typing import Any

from rlk_ledger_schemas.errors import ConfigError


def env(name: str, environ: Mapping[str, str] | None = None) -> str | None:
    """An environment variable without surrounding blanks; None where it is unset or empty."""
    value = (os.environ if environ is None else environ).get(name, "").strip()
    return value or None


def choice(what: str, value: Any, known: tuple[str, ...]) -> str:
    """`value` when it is one of `known`; else raises ConfigError naming the nearest."""
    if value in known:
        return str(value)
    raise ConfigError(f"init: {what} {value!r} is unknown; {nearest(str(value), known)}")


def nearest(word: str, known: Sequence[str]) -> str:
    """A hint at the known word that `word` may have meant, or all of them."""
    import difflib  # for the error only: it costs a job's start-up several milliseconds

    near = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return f"did you mean {near[0]!r}?" if near else f"use one of {', '.join(known)}."
