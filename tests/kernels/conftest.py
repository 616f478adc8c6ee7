"""Triton's interpreter where there is no GPU, and thread counts as a fixture, restored after each test."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

if not torch.cuda.is_available():  # before any kernel is imported: Triton reads it when a kernel is defined
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(params=[1, 2], ids=["one-thread", "two-threads"])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """Run the test on one and on two intra-op threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)
