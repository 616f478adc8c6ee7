"""Contracts and decisions: what numbers were promised, what was asked for, what ran."""

from typing import Any, ClassVar, Literal

import msgspec

from rlk_ledger_schemas.errors import EventError
from rlk_ledger_schemas.events.base import Arrays, Count, Event, Free, Name, register
from rlk_ledger_schemas.fingerprints import contract_id

ContractKind = Literal[
    "logprob", "attention", "linear", "norm", "rope", "activation", "embedding", "collective", "sampling", "layout"
]


@register
class ContractDeclared(Event, frozen=True, kw_only=True):
    """A numeric contract, once per writer; `contract_id` is derived from {kind, version, body}, checked when given."""

    TYPE: ClassVar[str] = "contract.declared"
    kind: ContractKind
    version: Name
    body: Free
    contract_id: Name | None = None

    @classmethod
    def check_lengths(cls, wire: Any, arrays: Arrays) -> None:
        derived = contract_id(wire.kind, wire.version, wire.body)
        if wire.contract_id is None:
            msgspec.structs.force_setattr(wire, "contract_id", derived)
        elif wire.contract_id != derived:
            raise EventError(f"contract.declared: `contract_id` is {wire.contract_id}, the body gives {derived}.")


@register
class KnobApplied(Event, frozen=True, kw_only=True):
    """One setting as requested, materialised and actually in force: three facts."""

    TYPE: ClassVar[str] = "knob.applied"
    path: Name
    requested: Any
    status: Literal["applied", "fallback", "unsupported", "unobservable", "error"]
    materialized: Any = None
    actual: Any = None
    evidence: str | None = None
    lifecycle: Literal["request", "engine", "process_group", "process", "build"] | None = None


class Rejected(msgspec.Struct, frozen=True, omit_defaults=True):
    """A backend that was not chosen, and why: a sentence, the code of `modes.REASONS`, and what would enable it."""

    backend: str
    reason: str
    code: str | None = None
    enable: str | None = None


@register
class OperatorDecided(Event, frozen=True, kw_only=True):
    """Which backend an operator got, which it was asked to have, and why.

    build, source: fingerprints of what the backend was built with and of its own source. callables: by name, the module
    and qualified name of each function that was loaded. reported: what the backend says about itself, which is no fact.
    """

    TYPE: ClassVar[str] = "operator.decided"
    operator: Name
    side: Name
    requested_backend: Name
    actual_backend: Name
    fallback: bool
    mode: Free | None = None
    contract_id: Name | None = None
    bucket: Literal["contract_preserving", "opportunistic", "reference", "native"] | None = None
    reason: str | None = None
    rejected: tuple[Rejected, ...] | None = None
    implementation: Name | None = None
    build: Name | None = None
    source: Name | None = None
    callables: Free | None = None
    reported: Free | None = None


@register
class CollectiveObserved(Event, frozen=True, kw_only=True):
    """A collective and the order in which it really reduces."""

    TYPE: ClassVar[str] = "collective.observed"
    op: Name
    group: Literal["tp", "sp", "cp", "ep", "pp", "dp"]
    group_size: Count
    reduction_order: Literal[
        "arrival", "nccl_algorithm", "global_rank_index", "global_block_index", "global_vocab_shard_index"
    ]
    accumulate_dtype: str | None = None
    downcast_point: str | None = None
    determinism: str | None = None
    backend: str | None = None

    @classmethod
    def check_lengths(cls, wire: Any, arrays: Arrays) -> None:
        if wire.determinism == "topology_stable" and wire.reduction_order in ("arrival", "nccl_algorithm"):
            raise EventError(
                f"collective.observed: determinism 'topology_stable' cannot be claimed with "
                f"reduction_order {wire.reduction_order!r}."
            )


@register
class SegmentTimed(Event, frozen=True, kw_only=True):
    """Time that one part of a distributed operator took on this rank, as its own engine or a profiler measured it.

    Exactly one of `operator` (computation, or a stretch nobody split) and `collective` (communication) names the part;
    `part_of` names what both belong to. Times are ns summed over `calls`, bytes are bytes. `elapsed_ns` is what passed
    from begin to end where computation and communication were not told apart. What was not measured is left out.
    """

    TYPE: ClassVar[str] = "segment.timed"
    TIMES: ClassVar[tuple[str, ...]] = ("elapsed_ns", "compute_ns", "exposed_ns", "overlapped_ns", "wait_ns")
    operator: Name | None = None
    collective: Name | None = None
    part_of: Name | None = None
    calls: Count | None = None
    elapsed_ns: Count | None = None
    compute_ns: Count | None = None
    exposed_ns: Count | None = None
    overlapped_ns: Count | None = None
    wait_ns: Count | None = None
    bytes: Count | None = None
    peak_memory_delta: int | None = None
    rank_skew_ns: Count | None = None
    stream: Name | None = None
    bucket_plan: Free | None = None
    overlap_fallback: str | None = None
    clock: Literal["host", "device"] | None = None
    evidence: str | None = None

    @classmethod
    def check_lengths(cls, wire: Any, arrays: Arrays) -> None:
        if (wire.operator is None) == (wire.collective is None):
            raise EventError("segment.timed: give either `operator` (computation) or `collective` (communication).")
        if wire.operator is not None and (wire.exposed_ns is not None or wire.overlapped_ns is not None):
            raise EventError(
                f"segment.timed: operator {wire.operator!r} has communication times; record its communication as a "
                "segment of its own, named by `collective`."
            )
        if wire.collective is not None and wire.compute_ns is not None:
            raise EventError(
                f"segment.timed: collective {wire.collective!r} has `compute_ns`; record its computation as a segment "
                "of its own, named by `operator`."
            )
        if all(getattr(wire, name) is None for name in cls.TIMES):
            raise EventError(f"segment.timed: nothing was measured; give one of {', '.join(cls.TIMES)}.")
