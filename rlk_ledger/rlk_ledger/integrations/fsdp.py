"""FSDP through torch: digests of sharded weights without gathering them, and how a model is sharded."""

from rlk_ledger_sdk.integrations.fsdp import (
    is_sharded,
    partial_sums,
    place,
    record_sharding,
    record_weights,
    reduce_sums,
    sharded_digest,
)

__all__ = [
    "is_sharded",
    "partial_sums",
    "place",
    "record_sharding",
    "record_weights",
    "reduce_sums",
    "sharded_digest",
]
