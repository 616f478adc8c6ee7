"""Claim: under every placebo schedule a row of linear and of linear_logprob depends on that row alone, bit for bit; the
suite catches what torch itself offers in their place; leaves partition K."""

from __future__ import annotations

import itertools

import pytest
import torch

from rlk_ledger_kernels.bits import same_bits
from rlk_ledger_kernels.ops.linear.contract import LinearContract
from rlk_ledger_kernels.ops.linear.torch import leaf_spans, linear, pack_linear
from rlk_ledger_kernels.ops.linear_logprob.torch import linear_logprob, pack_head
from rlk_ledger_kernels.ops.selected_logprob.contract import LogprobContract
from rlk_ledger_kernels.probe import using_threads
from rlk_ledger_kernels.schedule import Schedule, placebo_schedules
from rlk_ledger_kernels.suite.invariance import first_mismatch

SCHEDULES = placebo_schedules(4)
DTYPES = (torch.float32, torch.bfloat16)
NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


def rows(count: int, width: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn((count, width), generator=torch.Generator().manual_seed(count * 10_007 + width)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_linear_is_batch_invariant(schedule: Schedule, dtype: torch.dtype) -> None:
    packed = pack_linear(rows(96, 1540, dtype), LinearContract(output=NAMES[dtype], schedule=schedule))
    assert first_mismatch(lambda x: linear(x, packed), rows(150, 1540, dtype)) is None


def test_linear_gives_the_same_bits_on_one_and_two_threads() -> None:
    packed = pack_linear(rows(256, 1536), LinearContract())
    x = rows(700, 1536)
    results = []
    for count in (1, 2):
        with using_threads(count):
            results.append(linear(x, packed))
    assert same_bits(results[0], results[1])


def test_the_suite_catches_a_plain_matmul() -> None:
    weight = rows(96, 1536)
    assert first_mismatch(lambda x: x @ weight.T, rows(150, 1536)) is not None


def test_the_suite_catches_torch_silu() -> None:
    """Wrong on a CPU: the last elements of a thread's share take a scalar path with other bits."""
    assert first_mismatch(lambda x: torch.nn.functional.silu(x * 4), rows(150, 13)) is not None


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_linear_logprob_is_batch_invariant(schedule: Schedule) -> None:
    head = pack_head(rows(272, 64), LogprobContract(temperature=0.7, schedule=schedule))
    x = torch.cat((torch.arange(150)[:, None] % 128, rows(150, 64)), dim=1)

    def operator(packed: torch.Tensor) -> torch.Tensor:
        tokens = packed[:, 0].nan_to_num(0.0, 0.0, 0.0).clamp(0, 127).to(torch.int64)
        return linear_logprob(packed[:, 1:], head, tokens)

    assert first_mismatch(operator, x) is None


def test_leaves_partition_k_and_respect_the_limit() -> None:
    for k in (1, 7, 128, 129, 384, 1000, 4096):
        for leaf in (1, 24, 128, 256):
            spans = leaf_spans(k, leaf)
            assert spans[0][0] == 0
            assert spans[-1][1] == k
            assert all(a[1] == b[0] for a, b in itertools.pairwise(spans))
            assert all(0 < end - start <= leaf for start, end in spans)
