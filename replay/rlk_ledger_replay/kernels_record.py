"""The certificate of the kernels as an event of a run."""

from __future__ import annotations

import platform
import uuid
from dataclasses import dataclass
from os import environ
from typing import Any

from rlk_ledger.ledger import open_or_begin
from rlk_ledger.terminal import require_url
from rlk_ledger_kernels.suite.certificate import Certificate
from rlk_ledger_schemas.errors import SpoolError, StoreError
from rlk_ledger_schemas.objects import check_run_id

VARIABLES = (
    "CUBLAS_WORKSPACE_CONFIG",
    "CUDA_LAUNCH_BLOCKING",
    "CUDA_VISIBLE_DEVICES",
    "MKL_CBWR",
    "MKL_NUM_THREADS",
    "NVIDIA_TF32_OVERRIDE",
    "OMP_NUM_THREADS",
    "TRITON_INTERPRET",
)
"""Variables that may change bits or who runs."""


@dataclass(frozen=True)
class Recorded:
    """Where a certificate went. not_recorded: why it did not, where a store refused it."""

    run_id: str
    not_recorded: str | None = None


def record_certificate(url: str | None, run_id: str | None, certificate: Certificate) -> Recorded:
    """Write `kernels.certified` into a run, a new one where none is named; the ledger is begun where there is none.

    A store that refuses costs the record and not the answer. Raises LedgerError for a ledger that cannot be read.
    """
    name = check_run_id(run_id) if run_id is not None else f"kernels-{uuid.uuid4().hex[:12]}"
    ledger = open_or_begin(require_url(url))
    try:
        with ledger.writer(name, role="replay") as writer:
            writer.record("kernels.certified", **certificate.to_event(), environment=_environment())
    except (StoreError, SpoolError) as error:
        return Recorded(name, str(error))
    return Recorded(name)


def _environment() -> dict[str, Any]:
    return {
        "python": platform.python_version(),
        "machine": platform.machine(),
        "system": platform.system(),
        "variables": {name: environ[name] for name in VARIABLES if name in environ},
    }
