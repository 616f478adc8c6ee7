"""Versioned numeric tolerances; part of every verdict's identity, never a flag.

`abs(candidate - reference) <= atol + rtol * abs(reference)` against a float32 reference fed the same inputs.
A missing entry fails closed: `tolerance` raises.
"""

import msgspec

from rlk_ledger_schemas.dtypes import dtype_name
from rlk_ledger_schemas.errors import UsageError
from rlk_ledger_schemas.fingerprints import canonical_json, sha256

VERSION = "ws1-c1-v2"


class Tolerance(msgspec.Struct, frozen=True):
    """Absolute (in the unit of the value) and relative tolerance."""

    atol: float
    rtol: float


_TABLE: dict[tuple[str, str], Tolerance] = {
    ("elementwise", "float32"): Tolerance(1e-5, 1e-5),
    ("elementwise", "bfloat16"): Tolerance(2e-2, 1.6e-2),
    ("elementwise", "float16"): Tolerance(1e-3, 1e-3),
    ("reduction", "float32"): Tolerance(1e-4, 1e-4),
    ("reduction", "bfloat16"): Tolerance(5e-2, 2e-2),
    ("reduction", "float16"): Tolerance(1e-3, 1e-3),
    ("attention", "float32"): Tolerance(1e-4, 1e-4),
    ("attention", "bfloat16"): Tolerance(5e-2, 2e-2),
    ("attention", "float16"): Tolerance(1e-3, 1e-3),
    ("logprob", "float32"): Tolerance(1e-5, 0.0),
    ("logprob", "bfloat16"): Tolerance(6e-2, 0.0),
    ("logprob", "float16"): Tolerance(5e-3, 0.0),
    ("batch_invariance", "float32"): Tolerance(0.0, 0.0),
    ("batch_invariance", "bfloat16"): Tolerance(0.0, 0.0),
    ("batch_invariance", "float16"): Tolerance(0.0, 0.0),
}

FINGERPRINT = sha256(
    canonical_json({"version": VERSION, "table": {f"{op}/{dt}": [t.atol, t.rtol] for (op, dt), t in _TABLE.items()}})
)


def tolerance(op_class: str, dtype: str) -> Tolerance:
    """The tolerance of (op class, dtype however it is written) in VERSION; raises UsageError where none is defined."""
    try:
        return _TABLE[op_class, dtype_name(dtype) or dtype]
    except KeyError:
        raise UsageError(f"no tolerance for ({op_class}, {dtype}) in {VERSION}; no default exists.") from None
