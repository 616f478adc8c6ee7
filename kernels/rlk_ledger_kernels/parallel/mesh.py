"""The ranks of a job as a grid: tensor parallel along one axis, context parallel along the other.

Neighbouring ranks share a tensor-parallel group: global rank = cp rank x tp + tp rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist

from rlk_ledger_kernels.errors import ContractError
from rlk_ledger_kernels.parallel.group import DistributedGroup, Group, SimulatedGroup


@dataclass(frozen=True)
class Mesh:
    """The two groups that this process computes in."""

    tp: Group
    cp: Group


def simulated_mesh(tp: int = 1, cp: int = 1) -> Mesh:
    """All tp x cp ranks in this process."""
    return Mesh(SimulatedGroup(tp, "tp"), SimulatedGroup(cp, "cp"))


def distributed_mesh(tp: int = 1, cp: int = 1) -> Mesh:
    """One rank here, the others in the processes of the default torch.distributed group.

    Every process of the job calls it once, with the same numbers. Raises ContractError when tp x cp is not the number
    of processes.
    """
    world = dist.get_world_size()
    if tp < 1 or cp < 1 or tp * cp != world:
        raise ContractError(f"parallel: tp {tp} x cp {cp} ranks do not fill {world} processes; their product must")
    rank = dist.get_rank()
    rows = [dist.new_group([outer * tp + inner for inner in range(tp)]) for outer in range(cp)]
    columns = [dist.new_group([outer * tp + inner for outer in range(cp)]) for inner in range(tp)]
    return Mesh(DistributedGroup(rows[rank // tp], "tp"), DistributedGroup(columns[rank % tp], "cp"))
