"""Segment columns: fixed ones, promoted ones (projections of the envelope), and array columns.

Array columns are named `<array>__<dtype>` with dots turned into underscores (`partials_max__float32`), hold one list
of that dtype per row and null where the event has no such array. bfloat16 is stored as its uint16 bits.
"""

from typing import Any

import msgspec

FIXED = {
    "run_id": "string",
    "writer_id": "string",
    "seq": "int64",
    "type": "string",
    "schema_version": "int32",
    "wall_ns": "int64",
    "mono_ns": "int64",
    "step": "int64",
    "body": "binary",
    "leaf": "binary",
}


class Promoted(msgspec.Struct, frozen=True):
    """A projection column: its Parquet type and the path of its value in the envelope."""

    type: str
    path: tuple[str, ...]


def _same(*names: str, type_: str = "string") -> dict[str, Promoted]:
    return {name: Promoted(type_, (name,)) for name in names}


PROMOTED: dict[str, Promoted] = {
    **_same("rollout_id", "sample_id", "group_id", "prompt_id", "session_id", "source", "pass_id", "layout_id"),
    **_same("contract_id", "weight_version", "token_digest", "mask_digest", "engine", "status", "kind"),
    **_same("attempt", "turn", "start", type_="int64"),
    **_same("reward", type_="float64"),
    "shard_axis": Promoted("string", ("shard", "axis")),
    "shard_rank": Promoted("int64", ("shard", "rank")),
    "shard_world_size": Promoted("int64", ("shard", "world_size")),
    "cached_tokens": Promoted("int64", ("cache", "cached_tokens")),
    "cache_writer_version": Promoted("string", ("cache", "writer_version")),
    "temperature": Promoted("float64", ("sampling", "temperature")),
}


def array_column(name: str, dtype: str) -> str:
    """The column that holds array `name` of `dtype`."""
    return f"{name.replace('.', '_')}__{dtype}"


def project(envelope: dict[str, Any], column: Promoted) -> Any:
    """The value a promoted column must hold for `envelope`: None where absent or of another type."""
    value: Any = envelope
    for key in column.path:
        if not isinstance(value, dict) or key not in value:
            return None
        value = value[key]
    if isinstance(value, bool):
        return None
    if column.type == "string":
        return value if isinstance(value, str) else str(value) if isinstance(value, int) else None
    if column.type == "float64":
        return float(value) if isinstance(value, int | float) else None
    return value if isinstance(value, int) and abs(value) < 2**63 else None
