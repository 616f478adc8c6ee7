"""What the plain fields of a sample must be before strict believes them: the types `rollout.sample` has on the wire."""

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from rlk_ledger_schemas.events import RolloutSample, plain

FILTERS = ("temperature", "top_p", "top_k", "min_p")
_FIELDS = ("sample_id", "prompt_id", "engine", "metadata_source")
_TYPES = {field.name: field.type for field in msgspec.structs.fields(RolloutSample) if field.name in _FIELDS}


def wrong_types(fields: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(field, what it is) of every plain field that record() would refuse; absent ones are nobody's mistake here."""
    for name, kind in _TYPES.items():
        value = fields.get(name)
        if value in (None, ""):
            continue
        try:
            msgspec.convert(plain(value), kind)
        except Exception:  # a caller's object may answer a look at it with anything
            yield name, f"a {type(value).__name__}"
    sampling = fields.get("sampling")
    if sampling is not None and not isinstance(sampling, Mapping | msgspec.Struct):
        yield "sampling", f"a {type(sampling).__name__}"
        return
    for name in FILTERS:
        value = plain(sampling.get(name) if isinstance(sampling, Mapping) else getattr(sampling, name, None))
        if value is not None and not is_number(value):
            yield f"sampling.{name}", f"{value!r}"[:80]


def is_number(value: Any) -> bool:
    """Whether `value` is an int or a float that equals itself: no bool, no text, no NaN."""
    return isinstance(value, int | float) and not isinstance(value, bool) and value == value


def span_row(span: Any) -> tuple[int, int, str]:
    """(start, end, version) of a weight span, a mapping or an object; raises TypeError for any other type in it."""
    start, end, version = (
        plain(span.get(name) if isinstance(span, Mapping) else getattr(span, name, None))
        for name in ("start", "end", "version")
    )
    if not (type(start) is type(end) is int and isinstance(version, str)):
        raise TypeError
    return start, end, version
