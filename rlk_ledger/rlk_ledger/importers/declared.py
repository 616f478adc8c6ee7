"""What the person who imports says of a run and no dump can: contract fields and weight versions.

`temperature=0.7` holds for every source, `training.compute_dtype=bfloat16` for one. Such fields enter the `logprob`
contracts, whose label `declared` lists them. A weight version enters samples and values that have none, as `defaulted`:
nobody measured it. `{step}` in it stands for the step.
"""

import difflib
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from rlk_ledger_schemas.contracts import known_fields
from rlk_ledger_schemas.errors import UsageError

_SOURCES = ("rollout", "training", "reference", "teacher")
_KNOWN: dict[str, Any] = {"alignment": "token_i_given_before_i"}
"""What every format here means by entry i."""
_VERSION = "weight_version"


@dataclass(frozen=True, slots=True)
class Declared:
    """Stated fields by source."""

    fields: dict[str, dict[str, Any]] = field(default_factory=dict)

    @classmethod
    def parse(cls, texts: Iterable[str]) -> "Declared":
        """From `[source.]name=value` texts, values as JSON where they are; raises UsageError."""
        fields: dict[str, dict[str, Any]] = {source: {} for source in _SOURCES}
        for text in texts:
            name, equals, value = text.partition("=")
            source, dot, rest = name.partition(".")
            known = source in _SOURCES and bool(dot)
            key = rest if known else name
            if not equals or not value or re.fullmatch(r"[a-z][a-z0-9_]*", key) is None:
                raise UsageError(
                    f"--declare {text!r} is no NAME=VALUE such as temperature=0.7 or training.compute_dtype=bfloat16."
                )
            _refuse_near_miss(key, text)
            for one in (source,) if known else _SOURCES:
                fields[one][key] = value if key == _VERSION else _value(value)
        return cls(fields)

    def body(self, source: str) -> dict[str, Any]:
        """The logprob contract of one source: what its format means, and what was stated."""
        stated = {name: value for name, value in self.fields.get(source, {}).items() if name != _VERSION}
        return {**_KNOWN, **stated}

    def labels(self, source: str) -> dict[str, str]:
        """The contract's labels: which of its fields were stated, which follow from the format."""
        stated = sorted(name for name in self.fields.get(source, {}) if name != _VERSION)
        return {"derived": ",".join(sorted(_KNOWN)), **({"declared": ",".join(stated)} if stated else {})}

    def weight_version(self, source: str, step: int | None) -> str | None:
        """The stated weight version of a source at a step, None where none was."""
        text = self.fields.get(source, {}).get(_VERSION)
        if text is None:
            return None
        if "{step}" in text and step is None:
            raise UsageError("--declare weight_version={step} needs steps, and these files name none.")
        return str(text).replace("{step}", str(step))


def _refuse_near_miss(key: str, text: str) -> None:
    """A field of one's own may be stated; one that is a known field's name but for a slip says nothing to anyone."""
    names = (_VERSION, *known_fields("logprob"))
    near = [] if key in names else difflib.get_close_matches(key, names, n=1, cutoff=0.85)
    if near:
        raise UsageError(f"--declare {text!r}: there is no field {key!r}; did you mean {near[0]!r}?")


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
