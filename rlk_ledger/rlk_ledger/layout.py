"""Where objects lie below a ledger's root. Paths are relative, use `/`, and are built here only.

    ledger.json
    canary/<name>                                        put-if-absent probe
    runs/<run_id>/run.json
    runs/<run_id>/segment/<shipper>/<n>-<root16>.parquet
    runs/<run_id>/receipt/<shipper>/<n>.json
    runs/<run_id>/checkpoint/<k>                         C2SP signed note over the receipts so far
    runs/<run_id>/index/<k>-<sha256, 16 digits>.parquet  what receipts say, consolidated; deletable
    runs/<run_id>/seal.json
    runs/<run_id>/hold/<id>.json  hold/<id>-released.json
    runs/<run_id>/derived/...                            projections, deletable, checked by nobody

`n` and `k` are written with at least eight digits, so that a listing comes in order.
"""

import re

from rlk_ledger_schemas.objects import check_run_id

LEDGER = "ledger.json"
CANARY = "canary"
RUNS = "runs"

_SHIPPER = re.compile(r"[0-9a-f]{32}")
# One number has one name: a second name for it would be an object that readers see and a check of the first misses.
_NUMBER = r"([0-9]{8}|[1-9][0-9]{8,14})"
_RECEIPT = re.compile(rf"receipt/([0-9a-f]{{32}})/{_NUMBER}\.json")
_CHECKPOINT = re.compile(rf"checkpoint/{_NUMBER}")
_INDEX = re.compile(rf"index/{_NUMBER}-([0-9a-f]{{16}})\.parquet")
_HOLD = re.compile(r"hold/([0-9a-f]{16})(-released)?\.json")
_SEGMENT = re.compile(rf"segment/([0-9a-f]{{32}})/{_NUMBER}-([0-9a-f]{{16}})\.parquet")


def run_root(run_id: str) -> str:
    """`runs/<run_id>`; raises UsageError when the run id is not a name."""
    return f"{RUNS}/{check_run_id(run_id)}"


def run_json(run_id: str) -> str:
    """Path of the run's run.json."""
    return f"{run_root(run_id)}/run.json"


def segment_name(shipper: str, n: int, root: bytes) -> str:
    """Name of a segment relative to its run; `root` is its content root (32 bytes)."""
    return f"segment/{shipper}/{n:08d}-{root.hex()[:16]}.parquet"


def segment_path(run_id: str, name: str) -> str:
    """Path of the segment a receipt calls `name`."""
    return f"{run_root(run_id)}/{name}"


def receipt_path(run_id: str, shipper: str, n: int) -> str:
    """Path of receipt `n` of a shipper's chain."""
    return f"{run_root(run_id)}/receipt/{shipper}/{n:08d}.json"


def parse_receipt(relative: str) -> tuple[str, int] | None:
    """(shipper, n) of a receipt's path relative to its run, None when it is no receipt's path."""
    match = _RECEIPT.fullmatch(relative)
    return (match[1], int(match[2])) if match else None


def parse_segment(relative: str) -> tuple[str, int, str] | None:
    """(shipper, n, first 16 hex digits of the root) of a segment's path relative to its run, or None."""
    match = _SEGMENT.fullmatch(relative)
    return (match[1], int(match[2]), match[3]) if match else None


def is_shipper(text: str) -> bool:
    """Whether `text` is a shipper or writer id: 32 lower-case hex digits."""
    return _SHIPPER.fullmatch(text) is not None


def checkpoint_path(run_id: str, k: int) -> str:
    """Path of checkpoint `k` of a run; the first is 0."""
    return f"{run_root(run_id)}/checkpoint/{k:08d}"


def index_path(run_id: str, k: int, digest: bytes) -> str:
    """Path of an index that ends with checkpoint `k`; `digest` is the SHA-256 of its bytes."""
    return f"{run_root(run_id)}/index/{k:08d}-{digest.hex()[:16]}.parquet"


def seal_path(run_id: str) -> str:
    """Path of the run's seal."""
    return f"{run_root(run_id)}/seal.json"


def parse_checkpoint(relative: str) -> int | None:
    """k of a checkpoint's path relative to its run, None when it is no checkpoint's path."""
    match = _CHECKPOINT.fullmatch(relative)
    return int(match[1]) if match else None


def parse_index(relative: str) -> tuple[int, str] | None:
    """(k, first 16 hex digits of its SHA-256) of an index's path relative to its run, or None."""
    match = _INDEX.fullmatch(relative)
    return (int(match[1]), match[2]) if match else None


def hold_path(run_id: str, hold_id: str, released: bool = False) -> str:
    """Path of a hold of a run, or of the object that releases it."""
    return f"{run_root(run_id)}/hold/{hold_id}{'-released' if released else ''}.json"


def parse_hold(relative: str) -> tuple[str, bool] | None:
    """(hold id, whether it is the release) of a hold's path relative to its run, None when it is no hold's path."""
    match = _HOLD.fullmatch(relative)
    return (match[1], match[2] is not None) if match else None
