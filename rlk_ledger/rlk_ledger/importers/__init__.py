"""Importers: dumps of other frameworks into a ledger, read under restriction and recorded as an `import` writer.

    path ──slime, vime, miles, prime_rl, nemo_rl──> Batch (samples, both sides' values, findings) ──writing──> ledger

Everything is read, checked and joined before the first event is written: a file that is refused leaves nothing behind.
"""

from importlib import import_module
from pathlib import Path

from rlk_ledger.importers.files import Progress
from rlk_ledger.importers.model import Batch

FORMATS = {
    "slime": "slime",
    "vime": "vime",
    "miles": "miles",
    "prime-rl": "prime_rl",
    "nemo-rl": "nemo_rl",
}
"""What the command calls a format, and its module here."""


def read(format_name: str, path: Path, progress: Progress) -> Batch:
    """Everything below `path` in one of FORMATS; raises FormatError or UsageError, one sentence."""
    batch: Batch = import_module(f"{__name__}.{FORMATS[format_name]}").read(path, progress)
    return batch
