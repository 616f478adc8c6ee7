"""Claim: linear, rms_norm, rope, swiglu and the log-probability of a row depend on that row alone, bit for bit.

Each operator goes through the invariance suite on one and two threads, and each suite is shown a wrong operator,
of a kind people really write, which it catches.
"""

from __future__ import annotations

import itertools

import pytest
import torch

from rlk_ledger_kernels.bits import same_bits
from rlk_ledger_kernels.ops.linear.contract import LinearContract
from rlk_ledger_kernels.ops.linear.torch import leaf_spans, linear, pack_linear
from rlk_ledger_kernels.ops.linear_logprob.torch import linear_logprob, pack_head
from rlk_ledger_kernels.ops.rope.contract import RopeContract
from rlk_ledger_kernels.ops.rope.table import frequencies, rope_table
from rlk_ledger_kernels.ops.selected_logprob.contract import LogprobContract
from rlk_ledger_kernels.probe import using_threads
from rlk_ledger_kernels.schedule import Schedule, placebo_schedules
from rlk_ledger_kernels.suite.invariance import first_mismatch

SCHEDULES = (Schedule(), *placebo_schedules(4))
# Two threads share the cores with whatever else runs, so they are asked for once per operator and shape.
THREADED = [(1, schedule) for schedule in SCHEDULES] + [(2, SCHEDULES[0])]
DTYPES = (torch.float32, torch.bfloat16)
NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


def rows(count: int, width: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn((count, width), generator=torch.Generator().manual_seed(count * 10_007 + width)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("threads", "schedule"), THREADED, indirect=["threads"])
@pytest.mark.parametrize(("k", "outputs"), [(128, 256), (384, 128), (1536, 96), (77, 13)])
def test_linear_is_batch_invariant(threads: int, schedule: Schedule, dtype: torch.dtype, k: int, outputs: int) -> None:
    packed = pack_linear(rows(outputs, k, dtype), LinearContract(output=NAMES[dtype], schedule=schedule))
    assert first_mismatch(lambda x: linear(x, packed), rows(150, k, dtype)) is None


def test_linear_gives_the_same_bits_on_one_and_two_threads() -> None:
    packed = pack_linear(rows(256, 1536), LinearContract())
    x = rows(700, 1536)
    results = []
    for count in (1, 2):
        with using_threads(count):
            results.append(linear(x, packed))
    assert same_bits(results[0], results[1])


def test_linear_merges_shards_of_k_to_the_same_bits() -> None:
    weight, x = rows(64, 1024), rows(40, 1024)
    contract = LinearContract(schedule=Schedule(k_leaf=128))
    whole = linear(x, pack_linear(weight, contract))
    for ranks in (2, 4, 8):
        width = 1024 // ranks
        parts = [
            linear(x[:, r * width : (r + 1) * width], pack_linear(weight[:, r * width : (r + 1) * width], contract))
            for r in range(ranks)
        ]
        while len(parts) > 1:
            parts = [parts[i] + parts[i + 1] for i in range(0, len(parts), 2)]
        assert same_bits(parts[0], whole)


def test_the_suite_catches_a_plain_matmul() -> None:
    weight = rows(96, 1536)
    assert first_mismatch(lambda x: x @ weight.T, rows(150, 1536)) is not None


def test_the_suite_catches_torch_silu() -> None:
    """Wrong on a CPU: the last elements of a thread's share take a scalar path with other bits."""
    assert first_mismatch(lambda x: torch.nn.functional.silu(x * 4), rows(150, 13)) is not None


def test_a_rope_table_does_not_depend_on_its_length() -> None:
    contract = RopeContract()
    long = rope_table(frequencies(64, 1e6), 513, contract)
    for length in (1, 7, 100):
        short = rope_table(frequencies(64, 1e6), length, contract)
        assert same_bits(short.cos_PD, long.cos_PD[:length])
        assert same_bits(short.sin_PD, long.sin_PD[:length])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("threads", "schedule"), THREADED, indirect=["threads"])
@pytest.mark.parametrize("vocabulary", [272, 1000, 3])
def test_linear_logprob_is_batch_invariant(
    threads: int, vocabulary: int, schedule: Schedule, dtype: torch.dtype
) -> None:
    contract = LogprobContract(temperature=0.7, logits=NAMES[dtype], schedule=schedule)
    head = pack_head(rows(vocabulary, 64, dtype), contract)
    x = torch.cat((torch.arange(150)[:, None] % min(vocabulary, 128), rows(150, 64)), dim=1).to(dtype)

    def operator(packed: torch.Tensor) -> torch.Tensor:
        tokens = packed[:, 0].nan_to_num(0.0, 0.0, 0.0).clamp(0, min(vocabulary, 128) - 1).to(torch.int64)
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
