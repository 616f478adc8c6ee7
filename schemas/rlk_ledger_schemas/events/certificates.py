"""What a device was shown to keep: the certificate of the deterministic kernels."""

from typing import Annotated, ClassVar, Literal

import msgspec
from msgspec import Meta

from rlk_ledger_schemas.events.base import Count, Digest, Event, Free, Name, register

Outcome = Literal["passed", "failed", "refused", "not_claimed", "not_recorded", "not_measured"]


class Checked(msgspec.Struct, frozen=True, omit_defaults=True):
    """What one suite found; `share` is the worst distance as a share of the tolerance, where one applies."""

    outcome: Outcome
    detail: str | None = None
    share: float | None = None
    bitwise: bool | None = None


class OperatorChecked(msgspec.Struct, frozen=True, omit_defaults=True):
    """One operator on one backend; `golden` maps a case to the SHA-256 of its output's bits."""

    operator: Name
    backend: Name
    contracts: tuple[str, ...]
    cases: Count
    invariance: Checked
    backward: Checked
    accuracy: Checked
    parity: Checked
    recorded_bits: Checked
    source: Digest | None = None
    build: Digest | None = None
    golden: dict[str, Digest] | None = None


class Unavailable(msgspec.Struct, frozen=True, omit_defaults=True):
    """A backend that could not run here, and what would enable it."""

    operator: Name
    backend: Name
    reason: str
    enable: str | None = None


@register
class KernelsCertified(Event, frozen=True, kw_only=True):
    """What the suites found on one device: operators and backends, transforms, wrong operators caught of those shipped.

    `verdict` is fail when a suite accuses an operator or misses a wrong one; not_measured backends stand beside it.
    """

    TYPE: ClassVar[str] = "kernels.certified"
    device: Name
    device_class: Annotated[str, Meta(min_length=1, max_length=512, description="what golden bits are recorded for")]
    verdict: Literal["pass", "fail", "inconclusive"]
    operators: tuple[OperatorChecked, ...]
    transforms: tuple[Name, ...]
    size: Literal["small", "large"]
    wrong_shipped: Count
    wrong_caught: Count
    tolerance_version: Name
    tolerance_fingerprint: Digest
    build: Free
    environment: Free | None = None
    unavailable: tuple[Unavailable, ...] | None = None
    reason: str | None = None
    elapsed_s: float | None = None
