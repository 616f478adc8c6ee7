"""How an attention over a long cache was split: recorded, so that nobody has to guess it from a launch."""

from types import MappingProxyType
from typing import Any, ClassVar, Literal

from rlk_ledger_schemas.arrays import ArraySpec
from rlk_ledger_schemas.errors import EventError
from rlk_ledger_schemas.events.base import Arrays, Count, Digest, Event, Name, register

ENTRY_FIELDS = ("sequence", "tp_rank", "cp_rank", "owner", "first_block", "end_block")
"""What the integers of one entry are, in this order; blocks are logical KV blocks, the end is exclusive."""


@register
class SplitkvPlanned(Event, frozen=True, kw_only=True):
    """An explicit split-KV plan: which owner reduces which logical blocks of every sequence, head group and CP rank.

    `plan_id` is the fingerprint of the plan's canonical form. `owners` is the number of splits each CP rank has,
    `num_splits` what was asked for; `auto` lets the batch decide, so a strict plan cannot have it.
    """

    TYPE: ClassVar[str] = "splitkv.planned"
    ARRAYS: ClassVar[Any] = MappingProxyType(
        {
            "blocks": ArraySpec("int32", required=True, doc="logical KV blocks of each sequence"),
            "entries": ArraySpec("int32", required=True, doc=f"rows of {', '.join(ENTRY_FIELDS)}"),
        }
    )
    plan_id: Digest
    kv_block: Count
    tp: Count
    cp: Count
    owners: Count
    num_splits: Count | Literal["auto"]
    merge_order: Literal["global_block_index", "global_block_index_descending"]
    blocks: Any = None
    entries: Any = None
    strict: bool | None = None
    side: Name | None = None
    contract_id: Name | None = None
    layout_id: Name | None = None
    pass_id: Name | None = None

    @classmethod
    def check_lengths(cls, wire: Any, arrays: Arrays) -> None:
        count, width = len(arrays["entries"]), len(ENTRY_FIELDS)
        cells = len(arrays["blocks"]) * wire.tp * wire.cp * wire.owners
        if count != cells * width:
            raise EventError(
                f"splitkv.planned: {len(arrays['blocks'])} sequences x tp {wire.tp} x cp {wire.cp} x {wire.owners} "
                f"owners need {cells} entries of {width} integers, `entries` has {count} integers."
            )
        if wire.strict and wire.num_splits == "auto":
            raise EventError("splitkv.planned: a strict plan cannot have num_splits 'auto'; give a number.")
