"""Weights as the trainer published them and as an engine received or holds them."""

from typing import ClassVar, Literal

import msgspec

from rlk_ledger_schemas.events.base import Count, Digest, Event, Name, register


class Adapter(msgspec.Struct, frozen=True):
    """A LoRA-style adapter by name and digest."""

    name: Name
    digest: Digest


class TensorDigest(msgspec.Struct, frozen=True, omit_defaults=True):
    """One canonical tensor's digest."""

    name: Name
    digest: Digest
    dtype: str | None = None
    shape: tuple[int, ...] | None = None


@register
class WeightsPublished(Event, frozen=True, kw_only=True):
    """What the trainer published under a version."""

    TYPE: ClassVar[str] = "weights.published"
    weight_version: Name
    digest: Digest
    tensor_count: Count
    stamp_rule: str | None = None
    adapters: tuple[Adapter, ...] | None = None
    skipped: tuple[str, ...] | None = None
    tensors: tuple[TensorDigest, ...] | None = None
    path: str | None = None
    file_digest: Digest | None = None


@register
class WeightsLoaded(Event, frozen=True, kw_only=True):
    """What an engine took under a version: `what` says received (handed to the loader) or holds (read back).

    `what` left out means the recorder did not say; readers treat it as `received`.
    """

    TYPE: ClassVar[str] = "weights.loaded"
    weight_version: Name
    digest: Digest
    tensor_count: Count
    engine: Name
    what: Literal["received", "holds"] | None = None
    adapters: tuple[Adapter, ...] | None = None
    skipped: tuple[str, ...] | None = None
    tensors: tuple[TensorDigest, ...] | None = None
    caches_flushed: bool | None = None
    path: str | None = None
    file_digest: Digest | None = None
