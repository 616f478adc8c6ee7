"""Contract fields and their class.

semantic: must agree, or the sides are not comparable. numeric: a difference is a finding. path: expected to differ,
never a finding. A field this table does not know is numeric: a difference nobody classified is worth a look.
"""

import struct
from typing import Any, Literal

from rlk_ledger_schemas.dtypes import dtype_name

FieldClass = Literal["semantic", "numeric", "path"]

_CLASSES: dict[str, dict[FieldClass, tuple[str, ...]]] = {
    "logprob": {
        "semantic": (
            "mode",
            "temperature",
            "top_p",
            "top_k",
            "min_p",
            "penalties",
            "padded_vocab",
            "padded_vocab_policy",
            "alignment",
            "sentinel_policy",
        ),
        "numeric": (
            "compute_dtype",
            "head_dtype",
            "logits_dtype",
            "downcast_point",
            "reduction_order",
            "reduction_dtype",
        ),
        "path": ("execution_path",),
    },
    "attention": {
        "semantic": ("mode", "causal_offsets", "softmax_scale", "window", "sinks"),
        "numeric": ("lse_dtype", "output_dtype", "downcast_point", "merge_order"),
        "path": ("split_kv_policy", "split_kv_plan", "kv_cache", "head_ownership", "sequence_ownership", "page_size"),
    },
    "rope": {
        "semantic": ("theta", "scaling", "rotary_dim", "layout", "position_source"),
        "numeric": ("cast_point", "table_dtype"),
        "path": ("fused", "state"),
    },
    "norm": {"semantic": ("eps",), "numeric": ("accumulate_dtype", "rounding_order"), "path": ("residual_fusion",)},
    "linear": {
        "semantic": ("quantisation", "scale_policy"),
        "numeric": ("accumulate_dtype", "k_tree", "split_k", "reduction_contract"),
        "path": ("sharding",),
    },
    "activation": {"semantic": ("variant",), "numeric": ("materialisation_point",), "path": ()},
    "layout": {"semantic": (), "numeric": (), "path": ("padding_side", "packing", "position_ids")},
}


def known_fields(kind: str) -> tuple[str, ...]:
    """The fields of a contract of `kind` that have a class of their own."""
    return tuple(name for fields in _CLASSES.get(kind, {}).values() for name in fields)


def field_class(kind: str, field: str) -> FieldClass:
    """The class of one field of a contract of `kind`."""
    for name, fields in _CLASSES.get(kind, {}).items():
        if field in fields:
            return name
    return "numeric"


def differing_fields(kind: str, left: dict[str, Any], right: dict[str, Any]) -> list[tuple[str, FieldClass, Any, Any]]:
    """(field, class, left value, right value) of fields both bodies declare and that differ, path fields left out."""
    shared = sorted(left.keys() & right.keys())
    rows = [(field, field_class(kind, field), left[field], right[field]) for field in shared]
    return [row for row in rows if row[1] != "path" and not same(row[2], row[3])]


def same(left: Any, right: Any) -> bool:
    """Whether two declared values are one: numbers as the float32 engines compute with, dtypes however written."""
    if left == right:
        return True
    if isinstance(left, str) and isinstance(right, str):
        return dtype_name(left) == dtype_name(right) is not None
    numbers = [isinstance(value, int | float) and not isinstance(value, bool) for value in (left, right)]
    return all(numbers) and _float32(left) == _float32(right)


def _float32(value: float) -> bytes | float:
    try:
        return struct.pack("<f", value)
    except OverflowError:
        return float(value)


def undeclared_fields(kind: str, left: dict[str, Any], right: dict[str, Any]) -> list[tuple[str, FieldClass]]:
    """(field, class) of fields only one body declares, path fields left out: not measured is not equal."""
    rows = [(field, field_class(kind, field)) for field in sorted(left.keys() ^ right.keys())]
    return [row for row in rows if row[1] != "path"]
