"""The tensors a vLLM worker holds, by canonical (Hugging Face) name, and their sums; runs inside the worker.

The loader fuses, shards, replicates and pads. This module undoes each by the layer's own fields: fused projections are
views, shards know where they sit in the whole tensor, replicated tensors count on one rank, vocabulary padding is left
out, a tied head is the embedding as long as it multiplies by it; where a layer keeps a weight and a kernel's packed
copy of it, what it multiplies by is what it holds. Sums of shards add up to the sum of the whole tensor
(`rlk_ledger_sdk.weights`).
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from rlk_ledger_sdk.weights import sum64x2

ROWS = 1 << 22
"""Elements of a padded block when a column shard is summed: bounds the temporary memory."""
BLOCK = 256
"""Unit vectors sent through a kernel at once."""
PROBES = 64
"""Columns of a packed copy that are compared with the weight beside it: a copy of others differs in nearly all."""


class Piece(NamedTuple):
    """Part of one canonical tensor. `tensor` is what this rank holds of it, at (row, column) of the whole `shape`."""

    name: str
    tensor: Any
    shape: tuple[int, ...]
    row: int
    column: int
    counted: bool
    """False on the ranks that hold a copy of what another rank counts."""


class Unread(NamedTuple):
    """A parameter whose canonical tensors cannot be read back, and why."""

    name: str
    reason: str


def pieces(model: Any, tp_rank: int) -> Iterator[Piece | Unread]:
    """Every canonical tensor `model` holds on this tensor rank, aliases once."""
    fused = getattr(model, "packed_modules_mapping", None) or {}
    tied = bool(getattr(getattr(model, "config", None), "tie_word_embeddings", False))
    seen: set[int] = set()
    for path, module in model.named_modules():
        if tied and path.rpartition(".")[2] == "lm_head":
            yield from _head_apart(path, module, tp_rank)
            continue
        for leaf, parameter in module.named_parameters(recurse=False):
            if id(parameter) in seen or "lora_" in path:
                continue
            seen.add(id(parameter))
            yield from _of_parameter(path.removesuffix(".base_layer"), leaf, module, parameter, fused, tp_rank)


def sums(piece: Piece) -> tuple[int, int]:
    """The pair of sums of a piece, at its place in the whole tensor."""
    tensor, shape = piece.tensor, piece.shape
    if len(shape) < 2 or tensor.shape[1:] == shape[1:]:
        width = 1
        for size in shape[1:]:
            width *= size
        return sum64x2(piece.name, tensor, start=piece.row * width)
    total = (0, 0)
    block = max(1, ROWS // shape[1])
    for low in range(0, tensor.shape[0], block):
        part = tensor[low : low + block]
        whole = part.new_zeros((part.shape[0], shape[1]))  # zero words add nothing to the sums
        whole[:, piece.column : piece.column + part.shape[1]] = part
        more = sum64x2(piece.name, whole, start=(piece.row + low) * shape[1])
        total = ((total[0] + more[0]) % (1 << 64), (total[1] + more[1]) % (1 << 64))
    return total


def _of_parameter(
    path: str, leaf: str, module: Any, parameter: Any, fused: dict[str, list[str]], tp_rank: int
) -> Iterator[Piece | Unread]:
    kinds = {kind.__name__ for kind in type(module).__mro__}
    name = f"{path}.{leaf}" if path else leaf
    if "FusedMoE" in kinds:
        yield Unread(name, "experts are stored fused and in a layout of the kernel")
        return
    method = type(getattr(module, "quant_method", None)).__name__
    if method != "NoneType" and not method.startswith("Unquantized"):
        yield Unread(name, f"it is quantised ({method})")
        return
    if "VocabParallelEmbedding" in kinds:
        held = _multiplied_by(module, parameter) if leaf == "weight" and "ParallelLMHead" in kinds else parameter
        yield from _vocabulary(name, module, held, tp_rank)
    elif "LinearBase" in kinds:
        yield from _linear(path, leaf, module, parameter, fused, kinds, tp_rank)
    elif parameter.numel() == 0:
        yield Unread(name, "it is empty after loading")
    else:
        yield Piece(name, parameter.detach(), tuple(parameter.shape), 0, 0, tp_rank == 0)


def _head_apart(path: str, head: Any, tp_rank: int) -> Iterator[Piece | Unread]:
    """A tied head that multiplies by something else than the embedding it shares.

    A reload that follows names finds no tensor for a tied head, and leaves an old packed copy under the new embedding.
    """
    weight = getattr(head, "weight", None)
    if weight is not None and (used := _multiplied_by(head, weight)) is not weight:
        yield from _vocabulary(f"{path}.weight", head, used, tp_rank)


def _multiplied_by(module: Any, weight: Any) -> Any:
    """`weight` itself, or the packed copy that the layer really multiplies by where that no longer equals it.

    A CPU build packs a copy for its kernel; a load that writes the weight in place leaves the copy as it was. Probed at
    some columns, read whole when one of them differs.
    """
    if getattr(module, "cpu_linear", None) is None or weight.dim() != 2 or not weight.numel():
        return weight
    columns = sorted({int(i * (weight.shape[1] - 1) / (PROBES - 1)) for i in range(PROBES)})
    seen = _through_kernel(module, weight, columns)
    if seen is None or bool((seen == weight.detach()[:, columns]).all()):
        return weight
    return _through_kernel(module, weight, range(weight.shape[1]))


def _vocabulary(name: str, module: Any, parameter: Any, tp_rank: int) -> Iterator[Piece | Unread]:
    indices = module.shard_indices
    count = indices.num_org_elements
    if parameter.shape[0] < count:
        yield Unread(name, "its rows are fewer than the vocabulary's share of this rank")
        return
    shape = (module.org_vocab_size, *parameter.shape[1:])
    counted = module.tp_size > 1 or tp_rank == 0
    yield Piece(name, parameter.detach()[:count], shape, indices.org_vocab_start_index, 0, counted)


def _linear(
    path: str, leaf: str, module: Any, parameter: Any, fused: dict[str, list[str]], kinds: set[str], tp_rank: int
) -> Iterator[Piece | Unread]:
    """The parts of one linear layer's weight or bias."""
    if leaf != "weight":
        tensor = parameter.detach() if parameter.numel() else None
    else:
        tensor = _multiplied_by(module, parameter).detach() if parameter.numel() else _packed(module)
    if tensor is None or tensor.dim() > 2:
        yield Unread(f"{path}.{leaf}", "its layout after loading is a kernel's own")
        return
    tensor = tensor.to(module.params_dtype)
    size, rank = getattr(module, "tp_size", 1), getattr(module, "tp_rank", 0)
    first = size > 1 or tp_rank == 0
    if "RowParallelLinear" in kinds:
        if leaf != "weight":
            yield Piece(f"{path}.{leaf}", tensor, tuple(tensor.shape), 0, 0, tp_rank == 0)
            return
        shape = (module.output_size, module.input_size)
        yield Piece(f"{path}.{leaf}", tensor, shape, 0, rank * tensor.shape[1], first)
        return
    if "ColumnParallelLinear" not in kinds:
        yield Piece(f"{path}.{leaf}", tensor, tuple(tensor.shape), 0, 0, tp_rank == 0)
        return
    parent, _, last = path.rpartition(".")
    names = fused.get(last) or [last]
    parts = _qkv(module) if "QKVParallelLinear" in kinds else _merged(module, size, rank)
    if len(names) != len(parts) or sum(part[0] for part in parts) != tensor.shape[0]:
        yield Unread(f"{path}.{leaf}", "the model does not say how it is fused")
        return
    low = 0
    for each, (rows, total, row, counted) in zip(names, parts, strict=True):
        full = f"{parent}.{each}.{leaf}" if parent else f"{each}.{leaf}"
        shape = (total, *tensor.shape[1:])
        yield Piece(full, tensor[low : low + rows], shape, row, 0, counted and first)
        low += rows


def _merged(module: Any, size: int, rank: int) -> list[tuple[int, int, int, bool]]:
    """(local rows, whole rows, first row, counted) of each output of a column-parallel layer."""
    outputs = getattr(module, "output_sizes", None) or [module.output_size]
    return [(each // size, each, rank * (each // size), True) for each in outputs]


def _qkv(module: Any) -> list[tuple[int, int, int, bool]]:
    """The same of a fused query, key and value projection; replicated heads count on the first of their ranks."""
    rank, copies = module.tp_rank, module.num_kv_head_replicas
    values = getattr(module, "v_head_size", module.head_size)
    query = (module.num_heads * module.head_size, module.total_num_heads * module.head_size)
    out = [(query[0], query[1], rank * query[0], True)]
    for width in (module.head_size, values):
        rows = module.num_kv_heads * width
        out.append((rows, module.total_num_kv_heads * width, (rank // copies) * rows, rank % copies == 0))
    return out


def _packed(module: Any) -> Any | None:
    """The weight of a layer that keeps only a kernel's packed copy; None when the layer cannot be run like this."""
    like = module.weight.new_empty((module.output_size_per_partition, module.input_size_per_partition))
    return _through_kernel(module, like, range(like.shape[1]))


def _through_kernel(module: Any, like: Any, columns: Sequence[int]) -> Any | None:
    """Columns of the weight the layer multiplies by, [rows of `like`, columns], read back through its own kernel.

    Multiplying by unit vectors picks each weight out exactly: one product, all others zero. Only the sign of a zero is
    not visible that way. None when the kernel's result is not of the shape and dtype of `like`.
    """
    rows, width = like.shape
    out = like.new_empty((rows, len(columns)))
    for low in range(0, len(columns), BLOCK):
        part = list(columns[low : low + BLOCK])
        unit = like.new_zeros((len(part), width))
        for row, column in enumerate(part):
            unit[row, column] = 1
        product = module.quant_method.apply(module, unit, bias=None)
        if tuple(product.shape) != (len(part), rows) or product.dtype != like.dtype:
            return None
        out[:, low : low + len(part)] = product.t()
    return out
