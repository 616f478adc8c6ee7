"""Tensors at the boundaries between the parts of a forward pass."""

from types import MappingProxyType
from typing import Annotated, Any, ClassVar

from msgspec import Meta

from rlk_ledger_schemas.arrays import ArraySpec
from rlk_ledger_schemas.errors import EventError
from rlk_ledger_schemas.events.base import Arrays, Count, Digest, Event, Name, register
from rlk_ledger_schemas.events.samples import Shard


@register
class BoundaryCaptured(Event, frozen=True, kw_only=True):
    """What one part of a model handed on in one pass: a digest of the tensor's bits, and the tensor when asked for.

    `order` counts the boundaries of one forward pass from 0. `inputs` names the boundaries it was computed from.
    `feature_range` is the half-open range of the last axis that this rank holds. Arrays reuse names that segments have
    columns for: a new array name would give every segment another column.
    """

    TYPE: ClassVar[str] = "boundary.captured"
    ARRAYS = MappingProxyType(
        {
            "values": ArraySpec("float32", doc="the tensor, row-major; 16-bit values widen exactly"),
            "position_ids": ArraySpec("int32", doc="position in its sequence of each row of the tensor"),
        }
    )
    boundary: Name
    order: Count
    digest: Digest
    layer: Count | None = None
    stage: Name | None = None
    inputs: tuple[Name, ...] | None = None
    dtype: str | None = None
    shape: tuple[Count, ...] | None = None
    feature_range: Annotated[tuple[Count, Count], Meta(description="half-open")] | None = None
    shard: Shard | None = None
    contract_ids: tuple[Name, ...] | None = None
    route: str | None = None
    pass_id: Name | None = None
    layout_id: Name | None = None
    values: Any = None
    position_ids: Any = None

    @classmethod
    def check_lengths(cls, wire: Any, arrays: Arrays) -> None:
        if wire.shape is not None and "values" in arrays:
            items = 1
            for size in wire.shape:
                items *= size
            if len(arrays["values"]) != items:
                raise EventError(
                    f"boundary.captured: `values` has {len(arrays['values'])} items, `shape` {wire.shape} has {items}."
                )
