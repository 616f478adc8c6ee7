"""FSDP through torch (`fully_shard` and FullyShardedDataParallel): digests of sharded weights without gathering them.

Every rank sums its own flat index ranges; integer sums add, and the digest of all is the one the unsharded model has. A
replica of a shard (hybrid sharding) and a replicated tensor are counted by one rank only.
"""

import sys
from collections.abc import Iterator, Mapping
from itertools import accumulate
from typing import Any, NamedTuple

import msgspec

from rlk_ledger_schemas.errors import UsageError
from rlk_ledger_schemas.fingerprints import MASK64, sum64x2_digest
from rlk_ledger_sdk.api import record, recording
from rlk_ledger_sdk.exchange import TIMEOUT_S, collect, give
from rlk_ledger_sdk.guard import guarded
from rlk_ledger_sdk.knobs import read_back
from rlk_ledger_sdk.weights import sum64x2

_WRAPPERS = frozenset({"_fsdp_wrapped_module", "_orig_mod", "module", "_checkpoint_wrapped_module"})
Sums = dict[str, tuple[int, int]]
_calls: dict[tuple[str, str], int] = {}
"""How often this process recorded an event under a version: what makes the keys of two calls different."""


class Piece(NamedTuple):
    """A contiguous flat range of a tensor this rank counts: canonical name, values [n], flat index of the first."""

    name: str
    values: Any
    start: int


class Held(NamedTuple):
    """One tensor of the model: its dtype and whole shape, whatever part of it is here."""

    dtype: str
    shape: tuple[int, ...]


def is_sharded(model: Any) -> bool:
    """Whether FSDP of either kind holds parameters of `model`, so that reading all of them needs every rank."""
    return any(_flat_param(m) is not None or _groups(m) for m in model.modules())


def place(group: Any = None) -> dict[str, Any]:
    """`rank`, `world_size` and `parallel` of this process as a data-parallel rank, for `rlk_ledger.init(**place())`."""
    distributed = sys.modules["torch"].distributed
    if not distributed.is_initialized():
        return {"rank": 0, "world_size": 1}
    rank, size = distributed.get_rank(), distributed.get_world_size()
    return {
        "rank": rank,
        "world_size": size,
        "parallel": {"dp": {"rank": distributed.get_rank(group), "size": distributed.get_world_size(group)}},
    }


def partial_sums(model: Any) -> Sums:
    """The sums of what this rank counts of each tensor of `model`, (0, 0) where it holds nothing: no communication.

    Every rank returns the same names in the same order; adding the sums of all ranks gives those of the whole tensors.
    """
    held, pieces = _walk(model)
    totals: Sums = dict.fromkeys(held, (0, 0))
    for piece in pieces:
        sums, before = sum64x2(piece.name, piece.values, piece.start), totals[piece.name]
        totals[piece.name] = ((before[0] + sums[0]) & MASK64, (before[1] + sums[1]) & MASK64)
    return totals


def reduce_sums(partials: Mapping[str, tuple[int, int]], group: Any = None, device: Any = None) -> Sums:
    """`partials` added over all ranks of `group` by one all-reduce of int64 [tensors, 2], which wraps mod 2^64.

    device: where the collective wants its tensor (`cuda` under NCCL); the CPU by default.
    """
    torch = sys.modules["torch"]
    rows = [[_signed(value) for value in pair] for pair in partials.values()]
    table = torch.tensor(rows, dtype=torch.int64, device=device)
    torch.distributed.all_reduce(table, group=group)
    return {name: (row[0] & MASK64, row[1] & MASK64) for name, row in zip(partials, table.tolist())}


def sharded_digest(model: Any, group: Any = None) -> tuple[str, dict[str, str]]:
    """(digest of all, digest of each) of a sharded model, equal to `state_digest` of the unsharded one.

    A collective: every rank of `group` (all ranks by default) must call it.
    """
    device = next((p.device for p in model.parameters()), None)
    sums = reduce_sums(partial_sums(model), group, device)
    return sum64x2_digest(sums.values()), {name: sum64x2_digest([pair]) for name, pair in sums.items()}


def record_weights(
    event: str, model: Any, weight_version: str, group: Any = None, *, timeout_s: float = TIMEOUT_S, **fields: Any
) -> str | None:
    """Records `weights.published` or `weights.loaded` (what the ranks hold) from rank 0 of `group`.

    Every rank calls it and none enters a collective: sums are left in torch.distributed's key-value store, and rank 0
    waits at most `timeout_s` seconds for them, so that a rank that does not record costs the digest, never the job.
    Returns the digest on rank 0, None elsewhere and where it could not be had. fields: further fields of the event
    (`engine` is required for `weights.loaded`).
    """
    if not recording():
        return None
    with guarded("fsdp weights"):
        sums = _added_up(event, weight_version, partial_sums(model), group, timeout_s)
        if sums is None:
            return None
        digest = sum64x2_digest(sums.values())
        what: dict[str, Any] = {"what": "holds"} if event == "weights.loaded" else {}
        tensors = [
            {"name": name, "digest": sum64x2_digest([sums[name]]), "dtype": one.dtype, "shape": list(one.shape)}
            for name, one in _walk(model)[0].items()
        ]
        record(
            event,
            weight_version=weight_version,
            digest=digest,
            tensor_count=len(sums),
            tensors=tensors,
            **what,
            **fields,
        )
        return digest
    return None


def _added_up(event: str, version: str, partials: Sums, group: Any, timeout_s: float) -> Sums | None:
    """The sums of all ranks of `group` on its first rank, None on the others."""
    distributed = sys.modules["torch"].distributed
    if not distributed.is_initialized() or distributed.get_world_size(group) == 1:
        return partials
    times = _calls[event, version] = _calls.get((event, version), -1) + 1
    ranks = list(distributed.get_process_group_ranks(group or distributed.group.WORLD))
    key, rank = f"fsdp/{event}/{version}/{times}/{ranks[0]}", distributed.get_rank()
    if rank != ranks[0]:
        give(key, rank, msgspec.msgpack.encode(partials))
        return None
    totals = dict(partials)
    for payload in collect(key, ranks[1:], timeout_s):
        for name, sums in msgspec.msgpack.decode(payload, type=Sums).items():
            before = totals[name]
            totals[name] = ((before[0] + sums[0]) & MASK64, (before[1] + sums[1]) & MASK64)
    return totals


def record_sharding(model: Any, requested: Mapping[str, Any] | None = None) -> None:
    """Records how the live model is sharded and which dtypes it computes and reduces in, one `knob.applied` each.

    requested: what the job asked for, by path (`fsdp.kind`, `fsdp.param_dtype`, `fsdp.reduce_dtype` ...).
    """
    if not recording():
        return
    with guarded("fsdp sharding"):
        for path, actual in _sharding(model).items():
            read_back(
                path,
                requested=_name((requested or {}).get(path)),
                actual=actual,
                evidence="the sharding state of the live modules",
                lifecycle="engine",
            )


def param_dtype(module: Any, model: Any) -> str | None:
    """The dtype FSDP of `model` computes `module` in, when its mixed precision policy sets one."""
    owner = _owner(module, model)
    policy = None if owner is None else _policy(owner)
    return None if policy is None else _name(getattr(policy, "param_dtype", None))


def _owner(module: Any, model: Any) -> Any:
    """The innermost FSDP module that `module` lies in."""
    owner = None
    for candidate in model.modules():
        if (_flat_param(candidate) is not None or _groups(candidate)) and any(m is module for m in candidate.modules()):
            owner = candidate
    return owner


def _sharding(model: Any) -> dict[str, Any]:
    modules = [m for m in model.modules() if _flat_param(m) is not None or _groups(m)]
    policies = [policy for policy in map(_policy, modules) if policy is not None]
    found: dict[str, Any] = {
        "fsdp.kind": "+".join(sorted({"fsdp1" if _flat_param(m) is not None else "fsdp2" for m in modules})) or "none",
        "fsdp.modules": len(modules),
        "fsdp.placements": _placements(model, modules),
    }
    for field in ("param_dtype", "reduce_dtype", "output_dtype", "cast_forward_inputs"):
        values = {_name(getattr(policy, field, None)) for policy in policies}
        found[f"fsdp.{field}"] = values.pop() if len(values) == 1 else sorted(map(str, values))
    return found


def _placements(model: Any, modules: list[Any]) -> dict[str, int]:
    """How many parameters lie in each way: `Shard(dim=0)`, `Replicate()`, FSDP1's strategy name."""
    count: dict[str, int] = {}
    for module in modules:
        flat = _flat_param(module)
        ways = [module.sharding_strategy.name] * len(flat._fqns) if flat is not None else []
        ways += [" ".join(map(str, p.sharded_param.placements)) for g in _groups(module) for p in g.fsdp_params]
        for way in ways:
            count[way] = count.get(way, 0) + 1
    return count


def _policy(module: Any) -> Any:
    if _flat_param(module) is not None:
        return getattr(module, "mixed_precision", None)
    return next((getattr(group, "mp_policy", None) for group in _groups(module)), None)


def _flat_param(module: Any) -> Any:
    """The flat parameter of an FSDP1 module, or None."""
    return getattr(getattr(module, "_handle", None), "flat_param", None)


def _groups(module: Any) -> list[Any]:
    """The parameter groups of a module `fully_shard` was called on."""
    get = getattr(module, "_get_fsdp_state", None)
    if not callable(get):
        return []
    state = get()
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        groups = [getattr(state, "_fsdp_param_group", None)]
    return [group for group in groups if group is not None]


def _walk(model: Any) -> tuple[dict[str, Held], list[Piece]]:
    """Every tensor of `model` by canonical name in a fixed order, and the pieces of them this rank counts."""
    names = {id(module): _canonical(name) for name, module in model.named_modules()}
    held: dict[str, Held] = {}
    pieces: list[Piece] = []
    taken: set[int] = set()
    aliases: set[str] = set()
    for module in model.modules():
        if _flat_param(module) is not None:
            taken.add(id(_flat_param(module)))
            _walk_flat(module, names[id(module)], held, pieces, aliases)
        for param in (param for group in _groups(module) for param in group.fsdp_params):
            info = param._module_info
            _take(_join(names[id(info.module)], info.param_name), param.sharded_param, held, pieces)
            taken |= {id(param.sharded_param), id(getattr(param, "_unsharded_param", None))}
    _walk_rest(model, names, held, pieces, taken, aliases)
    return dict(sorted(held.items())), pieces


def _walk_flat(module: Any, prefix: str, held: dict[str, Held], pieces: list[Piece], aliases: set[str]) -> None:
    """FSDP1 lays its parameters end to end in one flat tensor and cuts that; each shard says which part it has."""
    flat, handle = _flat_param(module), module._handle
    cut = handle.uses_sharded_strategy
    local = (getattr(flat, "_local_shard", flat) if cut else flat).detach()  # before the first forward it is its shard
    aliases |= {_join(prefix, _join(_canonical(i.module_name), i.param_name)) for i in flat._shared_param_infos}
    names = [_join(prefix, _canonical(fqn)) for fqn in flat._fqns]
    held.update({name: Held(_name(local.dtype), tuple(shape)) for name, shape in zip(names, flat._shapes)})
    if not cut:
        starts = [at for at, gap in zip(_starts(flat._numels_with_padding), flat._is_padding_mask) if not gap]
        if sys.modules["torch"].distributed.get_rank(handle.process_group) == 0:
            pieces += [Piece(name, local[at : at + n], 0) for name, at, n in zip(names, starts, flat._numels)]
    elif _first_replica(module):
        for name, info in zip(names, flat._shard_param_infos):
            if info.in_shard:
                values = local[info.offset_in_shard : info.offset_in_shard + info.numel_in_shard]
                pieces.append(Piece(name, values, info.intra_param_start_idx))


def _starts(numels: Any) -> list[int]:
    return [0, *accumulate(numels)][:-1]


def _first_replica(module: Any) -> bool:
    """Whether this rank is the replica of its shard that is counted (hybrid sharding has several)."""
    group = getattr(module, "_inter_node_pg", None)
    return group is None or sys.modules["torch"].distributed.get_rank(group) == 0


def _walk_rest(
    model: Any,
    names: Mapping[int, str],
    held: dict[str, Held],
    pieces: list[Piece],
    taken: set[int],
    aliases: set[str],
) -> None:
    """Parameters FSDP does not hold, and persistent buffers: every rank has them whole, or as a tensor of its own.

    FSDP1 registers views of its flat tensor under the original names, which are held already.
    """
    for module in model.modules():
        for short, tensor in {**module._parameters, **_persistent(module)}.items():
            name = _join(names[id(module)], short)
            if tensor is not None and id(tensor) not in taken and name not in held and name not in aliases:
                taken.add(id(tensor))
                _take(name, tensor, held, pieces)


def _persistent(module: Any) -> dict[str, Any]:
    return {n: b for n, b in module._buffers.items() if n not in module._non_persistent_buffers_set}


def _take(name: str, tensor: Any, held: dict[str, Held], pieces: list[Piece]) -> None:
    held[name] = Held(_name(tensor.dtype), tuple(tensor.shape))
    if not hasattr(tensor, "device_mesh"):
        distributed = sys.modules["torch"].distributed
        if not distributed.is_initialized() or distributed.get_rank() == 0:
            pieces.append(Piece(name, tensor.detach(), 0))
        return
    pieces += _ranges(name, tensor)


def _ranges(name: str, tensor: Any) -> Iterator[Piece]:
    """The flat ranges of this rank's part of a distributed tensor; raises UsageError for one that is not summed yet."""
    if any(p.is_partial() or type(p).__name__ == "_StridedShard" for p in tensor.placements):
        raise UsageError(f"fsdp: {name} lies as {tensor.placements}, whose flat ranges are not known; digest it whole.")
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None or any(p.is_replicate() and at for p, at in zip(tensor.placements, coordinate)):
        return
    shape, offset = _local_shape(tensor)
    local = tensor.to_local().detach()
    axis = next((i for i in range(len(shape)) if shape[i] != tensor.shape[i]), 0)
    if any(shape[i] != tensor.shape[i] for i in range(axis + 1, len(shape))):
        raise UsageError(f"fsdp: {name} is sharded along several axes ({tensor.placements}); digest it on one rank.")
    inner = 1
    for size in tensor.shape[axis + 1 :]:
        inner *= size
    rows = local.reshape(-1, shape[axis] * inner) if local.numel() else ()
    for row, values in enumerate(rows):
        yield Piece(name, values, (row * tensor.shape[axis] + offset[axis]) * inner)


def _local_shape(tensor: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    utils = sys.modules.get("torch.distributed.tensor._utils") or sys.modules["torch.distributed._tensor._utils"]
    return utils.compute_local_shape_and_global_offset(  # type: ignore[no-any-return]
        tensor.shape, tensor.device_mesh, tensor.placements
    )


def _canonical(name: str) -> str:
    return ".".join(part for part in name.split(".") if part and part not in _WRAPPERS)


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


def _name(value: Any) -> Any:
    text = str(value)
    return text.removeprefix("torch.") if text.startswith("torch.") else value


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value
