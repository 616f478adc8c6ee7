"""What the recorder judges while the job runs: drift of a batch, and which samples it may be trained on."""

import math
from typing import Annotated, ClassVar, Literal

import msgspec
from msgspec import Meta

from rlk_ledger_schemas.errors import EventError
from rlk_ledger_schemas.events.base import Arrays, Count, Event, Free, Name, register
from rlk_ledger_schemas.events.identity import Mode
from rlk_ledger_schemas.modes import OnMissing

Threshold = Annotated[float, Meta(ge=0.0)]


@register
class DriftDiagnosed(Event, frozen=True, kw_only=True):
    """Drift of one batch as the training process saw it; definitions are those of `metrics.METRICS`.

    `tokens` were compared, out of `active` ones; `off_policy` tokens (another weight version) are outside every metric.
    `excluded` counts active tokens that are no measurement, as `<side>.<class>`. `worst` is the token of
    `abs_dlogp_max`: sample, position in the response, dlogp. `exceeded` names the thresholds that were passed.
    """

    TYPE: ClassVar[str] = "drift.diagnosed"
    status: Literal["measured", "zero_active_tokens", "nothing_compared"]
    tokens: Count
    active: Count
    samples: Count | None = None
    zero_active_samples: Count | None = None
    off_policy: Count | None = None
    unversioned: Count | None = None
    clamped: Count | None = None
    excluded: dict[str, Count] | None = None
    metrics: dict[str, float | None] | None = None
    thresholds: dict[str, Threshold] | None = None
    exceeded: tuple[str, ...] | None = None
    worst: Free | None = None
    weight_version: Name | None = None
    pass_id: Name | None = None

    @classmethod
    def check_lengths(cls, wire: object, arrays: Arrays) -> None:
        for name, value in (getattr(wire, "thresholds", None) or {}).items():
            if not math.isfinite(value):
                raise EventError(f"drift.diagnosed: the threshold of {name} must be finite, got {value!r}.")


class SampleReason(msgspec.Struct, frozen=True, omit_defaults=True):
    """Why a sample was not simply admitted: a code of `modes.REASONS` and the field it is about."""

    code: Name
    field: str | None = None


class Decided(msgspec.Struct, frozen=True):
    """Samples of one batch with the same fate for the same reasons."""

    status: Literal["quarantined", "not_applicable"]
    reasons: tuple[SampleReason, ...]
    sample_ids: tuple[str, ...]


@register
class BatchAdmitted(Event, frozen=True, kw_only=True):
    """What admission did with one batch; `decisions` holds every sample that was not simply admitted.

    `mode` is what was asked for. Under audit the outcome is `observed`: nothing left the batch, and `decisions` says
    what strict would have done. `downgraded`: the whole batch was trained on under audit. `failed`: the step was ended.
    """

    TYPE: ClassVar[str] = "batch.admitted"
    outcome: Literal["admitted", "quarantined", "downgraded", "failed", "observed"]
    samples: Count
    admitted: Count
    quarantined: Count
    not_applicable: Count
    mode: Mode | None = None
    on_missing: OnMissing | None = None
    reasons: dict[str, Count] | None = None
    decisions: tuple[Decided, ...] | None = None
    tolerance_version: str | None = None
