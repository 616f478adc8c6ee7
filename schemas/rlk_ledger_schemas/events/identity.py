"""Who recorded, where, and what was lost."""

from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from rlk_ledger_schemas.errors import EventError
from rlk_ledger_schemas.events.base import Arrays, Count, Digest, Event, Free, Name, register

Role = Literal[
    "rollout", "training", "reference", "reward", "teacher", "router", "replay", "import", "shipper", "retention"
]
Size = Annotated[int, Meta(ge=1)]


class Mode(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The two orthogonal controls of the framework."""

    fast: Literal["off", "auto", "strict"] = "off"
    consistency: Literal["off", "audit", "strict"] = "off"


class Place(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One rank in one parallel group."""

    rank: Count
    size: Size


class Parallel(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """A process's place in every parallel group it belongs to."""

    tp: Place | None = None
    cp: Place | None = None
    pp: Place | None = None
    dp: Place | None = None
    ep: Place | None = None
    sp: Place | None = None


class Engine(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """The engine a process runs."""

    name: Name
    version: str | None = None
    instance: str | None = None
    server_group: str | None = None


class Revision(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """The source a process runs: commit and, when the tree is dirty, a digest of the difference."""

    commit: str | None = None
    dirty: str | None = None


@register
class RunOpened(Event, frozen=True, kw_only=True):
    """A run: roles with their world sizes, mode, redaction, lineage and what share of bodies is recorded."""

    TYPE: ClassVar[str] = "run.opened"
    roles: dict[str, Size]
    mode: Mode | None = None
    job: Free | None = None
    redaction: Literal["none", "hash", "drop"] | None = None
    lineage: Free | None = None
    sampling_policy: Free | None = None
    redaction_key_id: Annotated[str, Meta(description="of the key this process hashes tokens with")] | None = None


@register
class WriterOpened(Event, frozen=True, kw_only=True):
    """A process that records: role, rank, engine, place in the parallel groups, environment."""

    TYPE: ClassVar[str] = "writer.opened"
    role: Role
    rank: Count
    world_size: Size
    parallel: Parallel | None = None
    engine: Engine | None = None
    host: str | None = None
    pid: Count | None = None
    parent_writer: str | None = None
    environment: Free | None = None
    revision: Revision | None = None

    @classmethod
    def check_lengths(cls, wire: Any, arrays: Arrays) -> None:
        if wire.rank >= wire.world_size:
            raise EventError(f"writer.opened: rank {wire.rank} is outside a world of {wire.world_size}.")


@register
class WriterClosed(Event, frozen=True, kw_only=True):
    """A writer that ended on purpose; its last sequence number is this event's own."""

    TYPE: ClassVar[str] = "writer.closed"
    reason: str


@register
class WriterLost(Event, frozen=True, kw_only=True):
    """A writer found dead: `writer` (its id), the last sequence number recovered and bytes that were not a frame."""

    TYPE: ClassVar[str] = "writer.lost"
    writer: Name
    reason: str
    last_seq: Annotated[int, Meta(ge=-1)] | None = None
    bytes_left: Count | None = None


@register
class Gap(Event, frozen=True, kw_only=True):
    """Sequence numbers `first` to `last` of this writer were consumed and hold nothing, and why.

    `kind` is `audit` or `bulk` (dropped because the budget was used up), `rejected` (the event was malformed),
    or `internal` (the recorder itself failed). `bytes` counts what was dropped, where known.
    """

    TYPE: ClassVar[str] = "gap"
    kind: Literal["audit", "bulk", "rejected", "internal"]
    first: Count
    last: Count
    reason: str
    bytes: Count | None = None
    event_type: str | None = None


class Pin(msgspec.Struct, frozen=True, omit_defaults=True):
    """An exact library pin."""

    package: str
    version: str | None = None
    commit: str | None = None


class Environment(msgspec.Struct, frozen=True, omit_defaults=True):
    """What numbers depend on: interpreter, torch build, driver, device, pins, determinism variables."""

    python: str
    torch: str | None = None
    torch_build: Digest | None = None
    cuda: str | None = None
    driver: str | None = None
    device: str | None = None
    capability: str | None = None
    pins: tuple[Pin, ...] = ()
    variables: dict[str, str] | None = None
    backend_flags: dict[str, bool | int | str] | None = None
