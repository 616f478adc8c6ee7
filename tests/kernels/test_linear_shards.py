"""Tensor parallelism of linear without the hardware: shards of one weight give the bits of the whole."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from rlk_ledger_kernels.bits import same_bits
from rlk_ledger_kernels.errors import ContractError, OperandError
from rlk_ledger_kernels.ops.linear import reference
from rlk_ledger_kernels.ops.linear import torch as linear_torch
from rlk_ledger_kernels.ops.linear.contract import LinearContract
from rlk_ledger_kernels.ops.linear.tree import sum_blocks
from rlk_ledger_kernels.schedule import Schedule


def operands(rows: int, outputs: int, k: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows * 7919 + outputs * 31 + k)
    x, weight = (torch.randn((n, k), generator=generator).to(dtype) for n in (rows, outputs))
    return x, weight, torch.randn(outputs, generator=generator).to(dtype)


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize(
    ("dtype", "schedule"),
    [
        (torch.float32, Schedule()),
        (torch.bfloat16, Schedule()),
        (torch.float32, Schedule(k_leaf=24, k_order="descending")),
    ],
    ids=["float32", "bfloat16", "descending"],
)
def test_row_parallel_shards_merge_to_the_bits_of_one_rank(ranks: int, dtype: torch.dtype, schedule: Schedule) -> None:
    name = "bfloat16" if dtype == torch.bfloat16 else "float32"
    contract = LinearContract(output=name, schedule=schedule)
    x, weight, bias = operands(37, 72, 1032, dtype)  # 1032 = 8 x 129: leaves of unequal length
    whole = linear_torch.linear(x, linear_torch.pack_linear(weight, contract, bias))
    width = 1032 // ranks
    parts = [
        linear_torch.linear_partial(
            x[:, rank * width : (rank + 1) * width], linear_torch.pack_row_shard(weight, contract, ranks, rank)
        )
        for rank in range(ranks)
    ]
    kept = [part.clone() for part in parts]
    assert same_bits(linear_torch.merge_partials(parts, contract, bias), whole)
    assert all(same_bits(a, b) for a, b in zip(parts, kept, strict=True)), "merging changes no share"
    plain = reference.merge_partials(
        [
            reference.linear_partial(
                x[:, rank * width : (rank + 1) * width], reference.pack_row_shard(weight, contract, ranks, rank)
            )
            for rank in range(ranks)
        ],
        contract,
        bias,
    )
    torch.testing.assert_close(whole.float(), plain, atol=5e-2 if name == "bfloat16" else 1e-4, rtol=2e-2)


def test_a_merge_that_rounds_each_share_or_adds_in_rank_order_is_caught() -> None:
    contract = LinearContract(output="bfloat16")
    x, weight, bias = operands(37, 72, 1024, torch.bfloat16)
    whole = linear_torch.linear(x, linear_torch.pack_linear(weight, contract, bias))
    parts = [
        linear_torch.linear_partial(
            x[:, rank * 256 : (rank + 1) * 256], linear_torch.pack_row_shard(weight, contract, 4, rank)
        )
        for rank in range(4)
    ]
    rounded = [part.to(torch.bfloat16).float() for part in parts]
    assert not same_bits(linear_torch.merge_partials(rounded, contract, bias), whole)
    exact = LinearContract()
    whole = linear_torch.linear(x, linear_torch.pack_linear(weight, exact))
    assert not same_bits(((parts[0] + parts[1]) + parts[2]) + parts[3], whole)
    assert same_bits(linear_torch.merge_partials(parts, exact), whole)


@pytest.mark.parametrize("cuts", [(0, 72), (0, 16, 72), (0, 1, 8, 33, 72), (0, 7, 71, 72)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_column_parallel_slices_of_any_width_give_the_bits_of_the_whole(
    cuts: tuple[int, ...], dtype: torch.dtype
) -> None:
    contract = LinearContract()
    x, weight, bias = operands(37, 72, 1032, dtype)
    whole = linear_torch.linear(x, linear_torch.pack_linear(weight, contract, bias))
    slices = [
        linear_torch.linear(x, linear_torch.pack_linear(weight[start:end], contract, bias[start:end]))
        for start, end in pairwise(cuts)
    ]
    assert same_bits(torch.cat(slices, dim=1), whole)


@pytest.mark.parametrize(
    ("k", "leaf", "ranks", "rank", "message"),
    [
        (1024, 128, 3, 0, "rank 0 of 3 has no node"),
        (1024, 128, 4, 4, "rank 4 of 4 has no node"),
        (1020, 128, 8, 0, "K = 1020 does not divide into 8"),
        (1024, 256, 8, 0, "straddle the boundaries of 8 shards; choose schedule.k_leaf below 256"),
    ],
)
def test_a_shard_that_is_no_node_of_the_tree_is_refused_by_name(
    k: int, leaf: int, ranks: int, rank: int, message: str
) -> None:
    contract = LinearContract(schedule=Schedule(k_leaf=leaf))
    for module in (linear_torch, reference):
        with pytest.raises(ContractError, match=message):
            module.pack_row_shard(torch.zeros(16, k), contract, ranks, rank)


def test_a_shard_is_no_whole_weight_and_shares_must_belong_together() -> None:
    contract = LinearContract()
    shard = linear_torch.pack_row_shard(torch.zeros(16, 512), contract, 2, 0)
    with pytest.raises(OperandError, match="the weight is shard 0 of 2; use linear_partial"):
        linear_torch.linear(torch.zeros(3, 256), shard)
    with pytest.raises(OperandError, match=r"x has shape \(3, 512\), the weight needs \[rows, 256\]"):
        linear_torch.linear_partial(torch.zeros(3, 512), shard)
    with pytest.raises(OperandError, match="3 shards make no tree"):
        linear_torch.merge_partials([torch.zeros(2, 16)] * 3, contract)
    with pytest.raises(OperandError, match="float32 partial results of one shape"):
        linear_torch.merge_partials([torch.zeros(2, 16), torch.zeros(2, 16).bfloat16()], contract)
    with pytest.raises(ContractError, match="leaves of 512, and BLAS cuts K itself above 256"):
        linear_torch.pack_linear(torch.zeros(16, 1024), LinearContract(schedule=Schedule(k_leaf=512)))


def test_blocks_meet_along_the_binary_tree_over_their_indices() -> None:
    values = [torch.tensor([v]) for v in (1e8, 3.0, -1e8, 5.0, 7.0, 1e-3, 11.0)]
    v = [float(x) for x in values]
    f = lambda a, b: torch.tensor([a]) + torch.tensor([b])  # noqa: E731
    for count in range(1, 8):
        level = [torch.tensor([x]) for x in v[:count]]
        while len(level) > 1:
            level = [
                f(*pair) if len(pair) == 2 else pair[0] for pair in (level[i : i + 2] for i in range(0, len(level), 2))
            ]
        assert same_bits(sum_blocks(iter(values[:count])), level[0])
    assert sum_blocks([]) is None
