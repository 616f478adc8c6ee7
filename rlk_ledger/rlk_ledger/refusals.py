"""Events that no recorder of this format can have written: told by writer, number and field, and left out.

A ledger holds what its writers sent. Types and lengths are checked where an event is made; a reader checks them again,
so that one event with a list for a number costs that event and not the answer. What a newer writer may add - fields,
words of an enumeration - is no reason to refuse an event.
"""

import types
from functools import cache
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

import msgspec

from rlk_ledger_schemas.arrays import Array
from rlk_ledger_schemas.errors import EventError
from rlk_ledger_schemas.events import REGISTRY

_ASSIGNED: list[tuple[str, Any, Any]] = [
    ("schema_version", int | None, None),
    ("seq", int | None, None),
    ("wall_ns", int | None, None),
    ("mono_ns", int | None, None),
    ("run_id", str | None, None),
    ("writer_id", str | None, None),
]


_MOST_RANKS = 1 << 15
"""Ranks a role or a shard may have: readers list the missing ones, and hold the rank of a token in 16 bits."""

_RANKED = frozenset({"run.opened", "writer.opened", "logprobs"})


class Refused(NamedTuple):
    """One event that was left out: `field` is where it is wrong, `reason` one sentence that names the event."""

    type: str
    writer_id: str
    seq: int
    field: str
    reason: str


def refuse(writer_id: str, seq: int, fields: dict[str, Any], arrays: dict[str, Array]) -> Refused | None:
    """What is wrong with an event's types or lengths, or None. An event type this version does not know passes."""
    kind = fields["type"]
    if kind not in REGISTRY:
        return None
    try:
        wire = msgspec.convert(fields, _reader(kind))
        said = _dtypes(kind, arrays) or _ranks(fields) or _lengths(kind, wire, arrays)
    except (msgspec.ValidationError, RecursionError) as error:
        said = str(error)
    if said is None:
        return None
    field = said.rpartition("`$.")[2].rstrip("`") if "`$." in said else said.partition("`")[2].partition("`")[0]
    reason = f"writer {writer_id}, event {seq} ({kind}): {said.rstrip('.')}; the event was left out."
    return Refused(kind, writer_id, seq, field or "type", reason)


def _dtypes(kind: str, arrays: dict[str, Array]) -> str | None:
    for name, spec in REGISTRY[kind].arrays.items():
        held = arrays.get(name)
        if held is None:
            if spec.required and not spec.tokens:  # token ids may have been redacted
                return f"array `{name}` is missing"
        elif ("float" in held.dtype) != ("float" in spec.dtype):
            return f"array `{name}` holds {held.dtype}, expected {spec.dtype}"
    return None


def _ranks(fields: dict[str, Any]) -> str | None:
    if fields["type"] not in _RANKED or not (fields.keys() & {"shard", "roles", "world_size"}):
        return None
    parallel = {f"parallel.{axis}": place for axis, place in (fields.get("parallel") or {}).items()}
    places = {"shard": fields.get("shard"), "roles": fields.get("roles"), "": fields, **parallel}
    for where, held in places.items():
        for name, value in (held or {}).items():
            counts = where == "roles" or name in ("rank", "size", "world_size")
            if counts and isinstance(value, int) and not 0 <= value <= _MOST_RANKS:
                return f"field `{f'{where}.{name}'.lstrip('.')}` is {value}, and there are {_MOST_RANKS} ranks at most"
    return None


def _lengths(kind: str, wire: Any, arrays: dict[str, Array]) -> str | None:
    check = REGISTRY[kind].check
    if check is None:
        return None
    if kind == "rollout.sample" and "response_token_ids" not in arrays:
        arrays = {**arrays, "response_token_ids": arrays["loss_mask"]}  # dropped by redaction: as many as the mask
    try:
        check(wire, arrays)
    except EventError as error:
        return str(error).partition(": ")[2] or str(error)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        return f"its fields do not belong together ({error})"
    return None


@cache
def _reader(kind: str) -> type[msgspec.Struct]:
    """The envelope of an event type as a reader takes it: known fields typed, unknown ones passed over."""
    public = REGISTRY[kind].public
    own = [
        (field.name, _lenient(field.type), *(() if field.required else (field.default,)))
        for field in msgspec.structs.fields(public)
        if field.name not in public.ARRAYS
    ]
    return msgspec.defstruct("Read" + public.__name__, [*_ASSIGNED, *own], kw_only=True, tag_field="type", tag=kind)


def _lenient(hint: Any) -> Any:
    """A field's type without what a newer writer may widen: closed structs, enumerations, limits of text."""
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        return _open(hint)
    origin, args = get_origin(hint), get_args(hint)
    if origin is Annotated:
        inner = _lenient(args[0])
        return inner if inner is str or inner is not args[0] else hint
    if origin is Literal:
        return str if all(isinstance(arg, str) for arg in args) else Any
    if origin in (Union, types.UnionType):
        return Union[tuple(_lenient(arg) for arg in args)]  # noqa: UP007 - members are only known here
    if origin in (tuple, list, dict):
        return origin[tuple(arg if arg is Ellipsis else _lenient(arg) for arg in args)]
    return hint


@cache
def _open(struct: type[msgspec.Struct]) -> type[msgspec.Struct]:
    own: list[Any] = []
    for field in msgspec.structs.fields(struct):
        hint = _lenient(field.type)
        if field.required:
            own.append((field.encode_name, hint))
        elif field.default is not msgspec.NODEFAULT:
            own.append((field.encode_name, hint, field.default))
        else:
            own.append((field.encode_name, hint, msgspec.field(default_factory=field.default_factory)))
    return msgspec.defstruct("Open" + struct.__name__, own, kw_only=True)
