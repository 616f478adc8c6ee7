"""Claim: a group hands over the parts of all ranks in rank order with their bytes unchanged, refuses parts that are not
what was announced, and tells each kind of exchange once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from rlk_ledger_kernels.bits import same_bits
from rlk_ledger_kernels.errors import ContractError, OperandError
from rlk_ledger_kernels.parallel.group import DistributedGroup, SimulatedGroup
from rlk_ledger_kernels.parallel.mesh import distributed_mesh, simulated_mesh


@pytest.fixture
def one_process(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_parts_of_different_length_arrive_in_rank_order() -> None:
    group = SimulatedGroup(3, "cp")
    parts = [torch.full((rows, 2), float(rank)) for rank, rows in enumerate((2, 0, 5))]
    found = group.all_gather(parts, [2, 0, 5], "global_block_index")
    assert [one.data_ptr() for one in found] == [one.data_ptr() for one in parts]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_bytes_survive_the_journey(one_process: None, dtype: torch.dtype) -> None:
    values = torch.tensor([[0.0, -0.0, float("inf")], [float("nan"), 1e-45, -3.5]]) if dtype.is_floating_point else None
    part = torch.tensor([[1, 0, 3], [4, 5, 0]]).to(dtype) if values is None else values.to(dtype)
    group = DistributedGroup(axis="tp")
    (found,) = group.all_gather([part.T], [3], "global_rank_index")
    assert torch.equal(found, part.T) if dtype is torch.bool else same_bits(found, part.T.contiguous())
    (empty,) = group.all_gather([part[:0]], [0], "global_rank_index")
    assert empty.shape == (0, 3)
    assert [one["reduction_order"] for one in group.observed()] == ["global_rank_index"]
    assert group.observed()[0]["backend"] == "gloo"


def test_parts_that_were_not_announced_are_refused() -> None:
    group = SimulatedGroup(2)
    part = torch.zeros(4, 3)
    with pytest.raises(OperandError, match="the part of tp rank 1 has 4 rows, announced are 5"):
        group.all_gather([part, part], [4, 5], "global_rank_index")
    with pytest.raises(OperandError, match="1 parts and 2 lengths for 2 of 2 tp ranks"):
        group.all_gather([part], [4, 4], "global_rank_index")
    assert group.observed() == ()


def test_each_kind_of_exchange_is_told_once() -> None:
    mesh = simulated_mesh(tp=2, cp=3)
    parts = [torch.zeros(1)] * 2
    for order in ("global_rank_index", "global_vocab_shard_index", "global_rank_index"):
        mesh.tp.all_gather(parts, [1, 1], order)
    assert [one["reduction_order"] for one in mesh.tp.observed()] == ["global_rank_index", "global_vocab_shard_index"]
    assert {one["group_size"] for one in mesh.tp.observed()} == {2}
    assert mesh.cp.observed() == ()


def test_a_mesh_that_does_not_fill_the_processes_is_refused(one_process: None) -> None:
    with pytest.raises(ContractError, match="tp 2 x cp 1 ranks do not fill 1 processes"):
        distributed_mesh(2, 1)
    mesh = distributed_mesh(1, 1)
    assert (mesh.tp.ranks, mesh.cp.ranks, mesh.tp.size) == ((0,), (0,), 1)
    with pytest.raises(ContractError, match="a cp group of 0 ranks"):
        simulated_mesh(1, 0)
