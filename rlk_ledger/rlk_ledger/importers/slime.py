"""slime: `--save-debug-rollout-data`, `--save-debug-train-data` or `--dump-details` (`rollout_data/`, `train_data/`).

Train dumps are read in format version 2 (all ranks in one file) and in the columns a rank wrote before it.
"""

from pathlib import Path

from rlk_ledger.importers import torch_dumps
from rlk_ledger.importers.files import Progress
from rlk_ledger.importers.model import Batch


def read(path: Path, progress: Progress) -> Batch:
    """Every dump below `path`; see `torch_dumps`."""
    return torch_dumps.read("slime", path, progress)
