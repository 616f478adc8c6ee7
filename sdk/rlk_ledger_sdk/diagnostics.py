"""Drift of a batch while the job runs: `diagnose()` computes it in the training process, returns and records it.

It changes no tensor, never raises into the step (a mistake is one warning and a gap event; it raises under
`on_error=raise`), and is a branch when consistency is off.
"""

import sys
from array import array
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from rlk_ledger_schemas.errors import UsageError
from rlk_ledger_schemas.metrics import LIVE
from rlk_ledger_sdk import api
from rlk_ledger_sdk.choices import nearest
from rlk_ledger_sdk.columns import Columns, columns
from rlk_ledger_sdk.measures import measure
from rlk_ledger_sdk.on_policy import on_policy
from rlk_ledger_sdk.reference import NOT_RECORDED, Reference

EVENT = "drift.diagnosed"


class Diagnosis(msgspec.Struct, frozen=True, kw_only=True):
    """What `diagnose` saw; the fields of `drift.diagnosed`, and `reference` to the recorded event.

    `status` is `measured`, `zero_active_tokens`, `nothing_compared` (active tokens, none of them comparable), `off`
    (consistency is off: nothing was computed) or `failed` (a gap event says why). `metrics` is empty unless measured.
    """

    status: Literal["measured", "zero_active_tokens", "nothing_compared", "off", "failed"]
    tokens: int = 0
    active: int = 0
    samples: int = 0
    zero_active_samples: int = 0
    off_policy: int = 0
    unversioned: int = 0
    clamped: int = 0
    excluded: dict[str, int] = {}
    metrics: dict[str, float] = {}
    exceeded: tuple[str, ...] = ()
    worst: dict[str, Any] | None = None
    reference: Reference = msgspec.field(default_factory=lambda: NOT_RECORDED)

    @property
    def coverage(self) -> float | None:
        """The share of active tokens that was compared; None where none is active."""
        return self.tokens / self.active if self.active else None


def diagnose(
    rollout: Any,
    training: Any,
    *,
    mask: Any = None,
    lengths: Any = None,
    sample_ids: Sequence[str] | None = None,
    rollout_versions: Sequence[Any] | str | None = None,
    training_version: str | None = None,
    pass_id: str | None = None,
    step: int | None = None,
    thresholds: Mapping[str, float] | None = None,
) -> Diagnosis:
    """Drift of one batch: `training` minus `rollout` log-probabilities (nats) over its active tokens.

    rollout, training, mask: `[samples, positions]` arrays or tensors, lists of one sequence a sample, or one dimension
    packed by `lengths`; they are read, never changed. mask: 1 where a token enters the loss (default: everywhere).
    sample_ids: one a sample, to name the worst token. rollout_versions: the weight version that sampled each sample, or
    its `weight_spans`, or one for all; tokens of a version other than `training_version` are `off_policy`, outside
    every metric. thresholds: upper bounds by metric name; those passed are `exceeded`. Metrics are those of
    `rlk_ledger_schemas.metrics.LIVE`. Recorded as `drift.diagnosed`; raises under `on_error=raise` only, and SpoolError
    where record() does.
    """
    recorder = api.acting()
    if recorder.mode.consistency == "off":
        return _OFF
    try:
        limits = _limits(thresholds)
        cut = columns(rollout, training, mask, lengths)
        seen = _judged(cut, rollout_versions, training_version, sample_ids, limits)
    except UsageError as error:
        return Diagnosis(status="failed", reference=recorder.rejected(EVENT, error))
    except Exception as error:
        return Diagnosis(status="failed", reference=recorder.failed(EVENT, error))
    told = {"weight_version": training_version, "pass_id": pass_id, "step": step, "thresholds": limits or None}
    fields = {name: getattr(seen, name) for name in seen.__struct_fields__ if name != "reference"}
    fields |= {name: value for name, value in told.items() if value is not None}
    return msgspec.structs.replace(seen, reference=recorder.emit(EVENT, fields))


_OFF = Diagnosis(status="off")


def _judged(
    cut: Columns,
    versions: Any,
    training_version: str | None,
    sample_ids: Sequence[str] | None,
    limits: dict[str, float],
) -> Diagnosis:
    np = None if isinstance(cut.rollout, array) else sys.modules["numpy"]
    if sample_ids is not None and len(sample_ids) != len(cut.counts):
        raise UsageError(f"diagnose: {len(sample_ids)} sample_ids for {len(cut.counts)} samples.")
    part = on_policy(np, cut, versions, training_version)
    found = measure(np, part.rollout, part.training, part.missing)
    active = sum(cut.counts)
    status: Literal["measured", "zero_active_tokens", "nothing_compared"] = "measured"
    if not found.tokens:
        status = "nothing_compared" if active else "zero_active_tokens"
    worst = None
    if found.worst is not None:
        worst = _place(cut, part.original(found.worst[0]), sample_ids) | {"dlogp": found.worst[1]}
    return Diagnosis(
        status=status,
        tokens=found.tokens,
        active=active,
        samples=len(cut.counts),
        zero_active_samples=sum(not count for count in cut.counts),
        off_policy=part.off_policy,
        unversioned=part.unversioned,
        clamped=found.clamped,
        excluded=found.excluded,
        metrics=found.metrics,
        exceeded=tuple(name for name, limit in limits.items() if found.metrics.get(name, 0.0) > limit),
        worst=worst,
    )


def _limits(thresholds: Mapping[str, float] | None) -> dict[str, float]:
    limits = {}
    for name, value in (thresholds or {}).items():
        if name not in LIVE:
            raise UsageError(f"diagnose: {name!r} is no live metric; {nearest(str(name), LIVE)}")
        limits[name] = float(value)
    return limits


def _place(cut: Columns, index: int, sample_ids: Sequence[str] | None) -> dict[str, Any]:
    """Sample and response position of an active token."""
    sample = 0
    while index >= cut.counts[sample]:
        index -= cut.counts[sample]
        sample += 1
    named = {} if sample_ids is None else {"sample_id": str(sample_ids[sample])}
    return {"sample": sample, "position": cut.row(sample)[index], **named}
