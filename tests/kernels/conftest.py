"""Triton's interpreter where there is no GPU, and what four ranks over gloo computed, once a session."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():  # before any kernel is imported: Triton reads it when a kernel is defined
    os.environ.setdefault("TRITON_INTERPRET", "1")

RANK = Path(__file__).parents[1] / "support" / "kernel_rank.py"


@pytest.fixture(scope="session")
def four_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[tuple[str, int], Any]]:
    """By rank, what `kernel_rank.py` computed: results by (operator, ranks that shared the work)."""
    folder = tmp_path_factory.mktemp("ranks")
    command = [sys.executable, str(RANK)]
    ranks = [subprocess.Popen([*command, str(r), str(folder)], stderr=subprocess.PIPE, text=True) for r in range(4)]
    try:
        told = [rank.communicate(timeout=120)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0] * 4, "\n".join(told)
    return [torch.load(folder / f"{rank}.pt") for rank in range(4)]
