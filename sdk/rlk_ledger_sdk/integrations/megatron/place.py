"""Where this process stands in Megatron's parallel groups, as `megatron.core.parallel_state` says."""

import sys
from dataclasses import dataclass
from typing import Any, NamedTuple

from rlk_ledger_schemas.errors import UsageError


class Axis(NamedTuple):
    """A rank in one parallel group, and the group's size."""

    rank: int
    size: int


@dataclass(frozen=True)
class Place:
    """This rank in every group. `sp` is True when sequence parallelism shares the tensor group."""

    rank: int
    world_size: int
    tp: Axis
    cp: Axis
    pp: Axis
    dp: Axis
    ep: Axis

    @property
    def last_stage(self) -> bool:
        """Whether this rank's pipeline stage holds the output layer."""
        return self.pp.rank == self.pp.size - 1

    @property
    def owner(self) -> bool:
        """Whether this rank records what its whole model-parallel group holds once: layouts, values."""
        return self.last_stage and self.tp.rank == 0 and self.cp.rank == 0


def read_place() -> Place:
    """This process's place; raises UsageError before `parallel_state.initialize_model_parallel`."""
    from megatron.core import parallel_state as state

    if not state.is_initialized():
        raise UsageError("megatron: parallel_state is not initialised; call this after initialize_model_parallel.")
    distributed = sys.modules["torch"].distributed
    return Place(
        rank=distributed.get_rank(),
        world_size=distributed.get_world_size(),
        tp=Axis(state.get_tensor_model_parallel_rank(), state.get_tensor_model_parallel_world_size()),
        cp=Axis(state.get_context_parallel_rank(), state.get_context_parallel_world_size()),
        pp=Axis(state.get_pipeline_model_parallel_rank(), state.get_pipeline_model_parallel_world_size()),
        dp=Axis(state.get_data_parallel_rank(), state.get_data_parallel_world_size()),
        ep=Axis(state.get_expert_model_parallel_rank(), state.get_expert_model_parallel_world_size()),
    )


def parallel(sequence_parallel: bool = False) -> dict[str, dict[str, int]]:
    """This process's place for `init(parallel=...)`: {tp, cp, pp, dp, ep: {rank, size}}, and sp where it is on."""
    place = read_place()
    axes = {name: getattr(place, name) for name in ("tp", "cp", "pp", "dp", "ep")}
    if sequence_parallel:
        axes["sp"] = place.tp
    return {name: {"rank": axis.rank, "size": axis.size} for name, axis in axes.items()}


def init_options(engine: str, sequence_parallel: bool = False) -> dict[str, Any]:
    """Options of `rlk_ledger.init` that Megatron knows: rank, world_size, parallel, engine.

    `engine` is the instance's name, as in "training-0".
    """
    place = read_place()
    return {
        "rank": place.rank,
        "world_size": place.world_size,
        "parallel": parallel(sequence_parallel),
        "engine": {"name": "megatron-core", "version": version(), "instance": engine},
    }


def version() -> str:
    """The version of Megatron-core in this process."""
    import megatron.core

    return str(megatron.core.__version__)
