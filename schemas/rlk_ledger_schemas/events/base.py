"""What every event is: a frozen Struct whose arrays live beside its envelope.

Two ways lead to the same bytes. `record("logprobs", sample_id=..., values=...)` checks keyword arguments with
`check_fields`; `record(Logprobs(sample_id=..., values=...))` checked them when the object was built. Both end in a
*wire* Struct (the envelope without arrays) and a dict of `Array`s.
"""

import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from rlk_ledger_schemas.arrays import Array, ArraySpec, to_array
from rlk_ledger_schemas.errors import EventError

SCHEMA_VERSION = 1

Count = Annotated[int, Meta(ge=0)]
Name = Annotated[str, Meta(min_length=1, max_length=512)]
DIGEST_PATTERN = r"^[a-z0-9]+:[0-9a-f]+$"
Digest = Annotated[str, Meta(pattern=DIGEST_PATTERN, max_length=300)]
Fraction = Annotated[float, Meta(ge=0.0, le=1.0)]
Free = dict[str, Any]
Arrays = dict[str, Array]

# Assigned by the recorder, never by the caller.
ASSIGNED = ("schema_version", "seq", "wall_ns", "mono_ns", "run_id", "writer_id")
COMMON = ("step", "rollout_id", "attempt", "labels")


class _Unassigned:
    """Type and value of an assigned field until the recorder sets it: no caller's value converts to it."""


_UNASSIGNED = _Unassigned()


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """Fields every event may carry: `step`, `rollout_id`, `attempt` (counts) and `labels` (small str -> str map)."""

    TYPE: ClassVar[str] = ""
    ARRAYS: ClassVar[Mapping[str, ArraySpec]] = MappingProxyType({})

    step: Count | None = None
    rollout_id: Count | Name | None = None
    attempt: Count | None = None
    labels: dict[str, str] | None = None

    @classmethod
    def check_lengths(cls, wire: Any, arrays: Arrays) -> None:
        """Checks relations inside one event (lengths, ranges); raises EventError."""

    def __post_init__(self) -> None:
        names = [name for name in self.__struct_fields__ if getattr(self, name) is not None]
        wire, arrays = check_fields(self.TYPE, {name: _thaw(getattr(self, name)) for name in names})
        for name in names:
            if name in arrays:
                msgspec.structs.force_setattr(self, name, arrays[name])
            else:
                msgspec.structs.force_setattr(self, name, freeze(getattr(wire, name)))

    def fields(self) -> dict[str, Any]:
        """The event as keyword arguments of record()."""
        return {n: _thaw(getattr(self, n)) for n in self.__struct_fields__ if getattr(self, n) is not None}


class EventType(msgspec.Struct, frozen=True):
    """One registered type: its public Struct, the wire Struct that a recorder fills, and its field names."""

    public: type[Event]
    wire: type[msgspec.Struct]
    names: frozenset[str]
    arrays: Mapping[str, ArraySpec]
    plan: tuple[tuple[str, str, str], ...]
    """(name, wire dtype, name in errors) of every array that is a field of its own."""
    nested: tuple[tuple[str, str, str, str, str], ...]
    """(name, parent field, key, wire dtype, name in errors) of every array inside a mapping field."""
    required_arrays: tuple[str, ...]
    check: Callable[[Any, Arrays], None] | None
    """Relations inside one event, for the types that have any."""


REGISTRY: dict[str, EventType] = {}


def register(cls: type[Event]) -> type[Event]:
    """Derives the wire Struct of `cls` and enters the type into REGISTRY."""
    wire = _wire_struct(cls, [(name, _Unassigned, _UNASSIGNED) for name in ASSIGNED])
    where = {name: (spec.dtype, f"{cls.TYPE}.{name}") for name, spec in cls.ARRAYS.items()}
    REGISTRY[cls.TYPE] = EventType(
        public=cls,
        wire=wire,
        names=frozenset(cls.__struct_fields__) | frozenset(cls.ARRAYS),
        arrays=cls.ARRAYS,
        plan=tuple((name, *where[name]) for name in cls.ARRAYS),
        nested=tuple((n, n.split(".")[0], n.split(".")[1], *where[n]) for n in sorted(cls.ARRAYS) if "." in n),
        required_arrays=tuple(name for name, spec in cls.ARRAYS.items() if spec.required),
        check=cls.check_lengths if "check_lengths" in vars(cls) else None,
    )
    return cls


def envelope_struct(kind: EventType) -> type[msgspec.Struct]:
    """The envelope of `kind` as a reader finds it: its wire Struct with the types of the assigned fields."""
    return _wire_struct(kind.public, [(name, str if name.endswith("_id") else int) for name in ASSIGNED])


def _wire_struct(cls: type[Event], fields: list[Any]) -> type[msgspec.Struct]:
    for field in msgspec.structs.fields(cls):
        if field.name in cls.ARRAYS:
            continue
        fields.append((field.name, field.type) if field.required else (field.name, field.type, field.default))
    return msgspec.defstruct(
        cls.__name__ + "Wire",
        fields,  # not frozen: the recorder numbers it, nobody else sees it
        kw_only=True,
        tag_field="type",
        tag=cls.TYPE,
        omit_defaults=True,
        forbid_unknown_fields=True,
        gc=False,  # lives for one record() and is part of no cycle
    )


_convert = msgspec.convert
encode = msgspec.msgpack.Encoder().encode
"""The envelope of a wire Struct: one msgpack map, absent fields left out."""


def check_fields(
    type_name: str, fields: dict[str, Any], assigned: Mapping[str, Any] | None = None
) -> tuple[Any, Arrays]:
    """Checks one event given as keyword arguments (`fields` is consumed); returns (wire Struct, arrays).

    `assigned` holds what the recorder adds (sequence number, clocks, run and writer id); without it the caller sets
    them on the wire Struct before encoding it. Raises EventError.
    """
    kind = REGISTRY.get(type_name) or lookup(type_name)
    arrays = take_arrays(kind, type_name, fields) if kind.plan else {}
    try:
        wire = _convert(fields, kind.wire)
    except Exception:  # a caller's object may answer a look at it with anything
        wire = convert(kind, type_name, fields)
    if kind.check is not None:
        kind.check(wire, arrays)
    if assigned is not None:
        for name in ASSIGNED:
            setattr(wire, name, assigned[name])
    return wire, arrays


def lookup(type_name: str) -> EventType:
    """The registered type called `type_name`; raises EventError that names the nearest one."""
    kind = REGISTRY.get(type_name)
    if kind is None:
        raise EventError(f"unknown event type {type_name!r}{_nearest(str(type_name), REGISTRY)}")
    return kind


def take_arrays(kind: EventType, type_name: str, fields: dict[str, Any]) -> Arrays:
    """Moves the array fields of `fields` (changed in place) into a dict of Arrays in wire dtype."""
    arrays: Arrays = {}
    for name, dtype, where in kind.plan:
        if name in fields:
            value = fields[name]
            if value is not None:
                arrays[name] = to_array(value, dtype, where)
            del fields[name]  # after the conversion: a caller may repair what was refused and try again
    for name, parent, key, dtype, where in kind.nested:
        inner = fields.get(parent)
        if inner is not None and isinstance(inner, Mapping) and inner.get(key) is not None:
            fields[parent] = {k: v for k, v in inner.items() if k != key}
            arrays[name] = to_array(inner[key], dtype, where)
    for name in kind.required_arrays:
        if name not in arrays:
            raise EventError(f"{type_name}: `{name}` is required and missing.")
    return arrays


def convert(kind: EventType, type_name: str, fields: dict[str, Any]) -> Any:
    """The wire Struct of array-free `fields`, slowly: numpy and torch scalars become numbers, errors get names."""
    if not fields.keys() <= kind.names:
        unknown = min(fields.keys() - kind.names)
        raise EventError(f"{type_name} has no field {unknown!r}{_nearest(unknown, kind.names)}")
    try:
        return msgspec.convert(plain(fields), kind.wire)
    except (msgspec.ValidationError, TypeError) as error:
        raise EventError(f"{type_name}: {_lower(str(error))}{_choices(kind, str(error))}.") from None
    except Exception as error:
        raise _unencodable(type_name, fields) or EventError(f"{type_name}: {_reason(error)}.") from None


def make_plain(type_name: str, wire: Any) -> bool:
    """Turns what MessagePack cannot hold and Python can (numpy and torch scalars in free fields) into plain values.

    False when nothing had to be turned; raises EventError, naming the field, for what has no plain value.
    """
    fields = {n: getattr(wire, n) for n in wire.__struct_fields__ if n not in ASSIGNED}
    refused = _unencodable(type_name, fields)
    if refused is not None:
        raise refused
    turned = False
    for name, value in fields.items():
        try:
            encode(value)
        except TypeError:
            setattr(wire, name, plain(value))
            turned = True
    return turned


def _unencodable(type_name: str, fields: Mapping[str, Any]) -> EventError | None:
    for name, value in fields.items():
        try:
            encode(plain(value))
        except Exception as error:
            return EventError(f"{type_name}: `{name}` cannot be stored: {_reason(error)}.")
    return None


def _reason(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "it is nested too deep, or holds itself"
    if isinstance(error, OverflowError):
        return "it holds an integer that does not fit 64 bits; use a string"
    if isinstance(error, UnicodeError):
        return "it holds text with a lone surrogate, which is not Unicode; encode it first"
    return f"{type(error).__name__}: {str(error).rstrip('.')}"


def plain(value: Any) -> Any:
    """Numpy and torch scalars as Python numbers, read-only mappings as dicts, recursively."""
    if isinstance(value, Mapping):
        return {k: plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    if hasattr(value, "item") and getattr(value, "ndim", 1) == 0:
        return value.item()
    return value


def freeze(value: Any) -> Any:
    """A deeply immutable copy: mappings become read-only, lists become tuples."""
    if isinstance(value, Mapping):
        return MappingProxyType({k: freeze(v) for k, v in value.items()})
    if isinstance(value, list | tuple):
        return tuple(freeze(v) for v in value)
    return value


def _thaw(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {k: _thaw(v) for k, v in value.items()}
    if isinstance(value, tuple):
        return [_thaw(v) for v in value]
    if isinstance(value, msgspec.Struct) and not isinstance(value, Array):
        return {n: _thaw(getattr(value, n)) for n in value.__struct_fields__ if getattr(value, n) is not None}
    return value


def _nearest(word: str, known: Any) -> str:
    import difflib  # for the error only: it costs a job's start-up several milliseconds

    near = difflib.get_close_matches(word, sorted(known), n=1, cutoff=0.5)
    return f"; did you mean {near[0]!r}?" if near else f"; known: {', '.join(sorted(known))}."


def _lower(text: str) -> str:
    text = text.replace("Object missing required field", "missing required field").replace(" - at `$.", " at `")
    return text.replace(f"Expected `str` matching regex {DIGEST_PATTERN!r}", "expected `<algorithm>:<hex>`")


def _choices(kind: EventType, text: str) -> str:
    """The values a field of fixed choices takes, when that is what msgspec's `text` refused; else nothing."""
    found = re.fullmatch(r"Invalid enum value .* - at `\$\.(\w+)`", text)
    if found is None:
        return ""
    declared = get_type_hints(kind.public).get(found[1])
    values = [v for part in (declared, *get_args(declared)) if get_origin(part) is Literal for v in get_args(part)]
    return f"; use one of {', '.join(map(str, values))}" if values else ""
