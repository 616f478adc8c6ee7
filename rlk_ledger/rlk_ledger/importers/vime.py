"""vime: slime's dumps with vLLM's fields in the samples, of which the supports of top-p are imported."""

from pathlib import Path

from rlk_ledger.importers import torch_dumps
from rlk_ledger.importers.files import Progress
from rlk_ledger.importers.model import Batch


def read(path: Path, progress: Progress) -> Batch:
    """Every dump below `path`; see `torch_dumps`."""
    return torch_dumps.read("vime", path, progress)
