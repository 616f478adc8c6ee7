"""What every importer makes of its files: samples with the values each side gave them, and what could not be known."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rlk_ledger.audit.finding import Finding

Ids = npt.NDArray[np.int32]
Mask = npt.NDArray[np.uint8]
Values = npt.NDArray[np.float32]

MEASURED, DERIVED, DEFAULTED, ABSENT = "measured", "derived", "defaulted", "absent"
"""What `metadata_source` says of a field: in the file; follows from it; stated by whoever imports; nowhere."""


@dataclass(frozen=True, slots=True)
class Source:
    """One file: where it is, its name below the imported path, the SHA-256 (hex) of its bytes and their number.

    `changed_ns` is when it was last written, as the file system says.
    """

    path: Path
    name: str
    sha256: str
    bytes: int
    changed_ns: int = 0

    @property
    def labels(self) -> dict[str, str]:
        """What every event that comes from this file carries."""
        return {"file": self.name, "digest": f"sha256:{self.sha256}"}


@dataclass(slots=True, eq=False)
class Scored:
    """Log-probabilities one side gave to a sample's response: float32 `values` (nats), one a token.

    `value_class` (uint8) is there when a value is missing; `ids` and `mask` are what this side says it scored;
    `fields` are further fields of the `logprobs` event.
    """

    source: str
    values: Values
    origin: Source
    value_class: Mask | None = None
    entropy: Values | None = None
    ids: Ids | None = None
    mask: Mask | None = None
    fields: dict[str, Any] = field(default_factory=dict)
    metadata: dict[str, str] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class Imported:
    """One sample: prompt and response token ids, loss mask (one entry a response token) and every side's values.

    `fields` are further fields of its `rollout.sample` event, `index` is what its framework calls it, `rollout_id` is
    there where the framework counts rollouts.
    """

    sample_id: str
    step: int | None
    prompt: Ids
    response: Ids
    mask: Mask
    origin: Source
    index: int | None = None
    rollout_id: int | None = None
    fields: dict[str, Any] = field(default_factory=dict)
    metadata: dict[str, str] = field(default_factory=dict)
    scores: list[Scored] = field(default_factory=list)

    @property
    def key(self) -> tuple[bytes, bytes]:
        """The tokens, which are what a join verifies."""
        return self.prompt.tobytes(), self.response.tobytes()


@dataclass(frozen=True, slots=True)
class Layout:
    """A `batch.layout` event: its fields, its step and where it comes from."""

    step: int | None
    fields: dict[str, Any]
    origin: Source


@dataclass(slots=True)
class Batch:
    """Everything read from one import; `notes` say in a sentence each what was left out on purpose."""

    format: str
    sources: list[Source] = field(default_factory=list)
    samples: list[Imported] = field(default_factory=list)
    layouts: list[Layout] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
