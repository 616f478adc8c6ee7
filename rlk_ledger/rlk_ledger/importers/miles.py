"""miles: slime's rollout dumps, and train dumps one file a rank (`train_data/<rollout_id>_<rank>.pt`).

Tensor-parallel ranks repeat each other's samples; a rank whose file is not there is a finding.
"""

from pathlib import Path

from rlk_ledger.importers import torch_dumps
from rlk_ledger.importers.files import Progress
from rlk_ledger.importers.model import Batch


def read(path: Path, progress: Progress) -> Batch:
    """Every dump below `path`; see `torch_dumps`."""
    return torch_dumps.read("miles", path, progress)
