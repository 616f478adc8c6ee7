"""The weights a Megatron job holds, under canonical Hugging Face names, without gathering them.

Every parameter of this rank is seen as parts of canonical tensors (`pieces`): fused projections are views, vocabulary
padding is left out, a tied head is an alias, and what every tensor rank holds equally counts on rank 0. The sums of
`sum64x2` do not depend on the order or the cut, so the sums of all ranks' parts add up to the digest of the checkpoint.

The names are those of Llama, Qwen2 and Qwen3. A parameter outside them (experts, multi-token prediction, bias of a
norm) is listed as skipped, never guessed.
"""

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import msgspec

from rlk_ledger_schemas.fingerprints import MASK64, sum64x2_digest
from rlk_ledger_sdk.integrations.megatron.modules import Stage, name_of
from rlk_ledger_sdk.integrations.megatron.place import Axis, Place
from rlk_ledger_sdk.weights import sum64x2, sum64x2_columns


class Piece(NamedTuple):
    """The part of canonical tensor `name` (of `shape`) that a parameter holds.

    `start` is the flat index of its first element; its rows follow each other in the canonical tensor, or are
    `columns` of wider rows. `replicated` parts are held equally by every tensor rank.
    """

    name: str
    tensor: Any
    shape: tuple[int, ...]
    start: int
    columns: bool = False
    replicated: bool = False


class Sums(NamedTuple):
    """What a rank adds to a canonical tensor: two sums mod 2^64, and the tensor's dtype and shape."""

    first: int
    second: int
    dtype: str
    shape: tuple[int, ...]


class Held(NamedTuple):
    """The canonical tensors of a whole model-parallel group and the parameters that have no canonical name."""

    tensors: dict[str, Sums]
    skipped: tuple[str, ...]

    @property
    def digest(self) -> str:
        """Equal to `state_digest` of the same tensors in one process."""
        return sum64x2_digest((one.first, one.second) for one in self.tensors.values())

    def listed(self) -> list[dict[str, Any]]:
        """The per-tensor list of `weights.published`, sorted by name."""
        return [
            {
                "name": name,
                "digest": sum64x2_digest([(one.first, one.second)]),
                "dtype": one.dtype,
                "shape": list(one.shape),
            }
            for name, one in sorted(self.tensors.items())
        ]


def held_by_rank(stage: Stage, place: Place, vocabulary: int, dtype: Any = None) -> Held:
    """This rank's sums. vocabulary: entries without padding. dtype: a torch dtype that the export casts to."""
    tensors: dict[str, Sums] = {}
    skipped: list[str] = []
    for chunk in stage.chunks:
        for name, parameter in chunk.named_parameters():
            parts = pieces(chunk, name, parameter.detach(), place.tp, vocabulary)
            if parts is None:
                skipped.append(name)
                continue
            for piece in parts:
                if not (piece.replicated and place.tp.rank):
                    _add(tensors, piece.name, _sums(piece, dtype))
    return Held(tensors, tuple(skipped))


def packed(held: Held) -> bytes:
    """A rank's sums as bytes for another rank."""
    return msgspec.msgpack.encode(held)


def held_by_group(parts: Iterable[bytes]) -> Held:
    """The sums of several ranks, added."""
    tensors: dict[str, Sums] = {}
    skipped: dict[str, None] = {}
    for part in parts:
        held = msgspec.msgpack.decode(part, type=Held)
        for name, sums in held.tensors.items():
            _add(tensors, name, sums)
        skipped |= dict.fromkeys(held.skipped)
    return Held(tensors, tuple(sorted(skipped)))


def _add(tensors: dict[str, Sums], name: str, more: Sums) -> None:
    held = tensors.get(name)
    if held is not None:
        first, second = (held.first + more.first) & MASK64, (held.second + more.second) & MASK64
        more = more._replace(first=first, second=second)
    tensors[name] = more


def _sums(piece: Piece, dtype: Any) -> Sums:
    tensor = piece.tensor if dtype is None else piece.tensor.to(dtype)
    if piece.columns:
        pair = sum64x2_columns(piece.name, tensor, piece.start, piece.shape[-1])
    else:
        pair = sum64x2(piece.name, tensor, piece.start)
    return Sums(*pair, name_of(tensor.dtype), piece.shape)


# -- names ------------------------------------------------------------------------------------------------------------

_WHOLE = {
    "input_layernorm.weight": "input_layernorm.weight",
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "post_attention_layernorm.weight",
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
    "self_attention.linear_proj.bias": "self_attn.o_proj.bias",
    "mlp.linear_fc2.bias": "mlp.down_proj.bias",
}
"""Parameters of a layer that every tensor rank holds, and their canonical names."""
_COLUMNS = {
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
    "mlp.linear_fc2.weight": "mlp.down_proj.weight",
}
"""Row-parallel weights: a rank holds columns of them."""


def pieces(model: Any, name: str, tensor: Any, tp: Axis, vocabulary: int) -> list[Piece] | None:
    """The canonical parts a parameter holds; [] for an alias of another one, None when it has no canonical name."""
    if name == "embedding.word_embeddings.weight":
        return _vocabulary_rows("model.embed_tokens.weight", tensor, tp, vocabulary)
    if name == "output_layer.weight":
        tied = bool(getattr(model, "share_embeddings_and_output_weights", False))
        return [] if tied else _vocabulary_rows("lm_head.weight", tensor, tp, vocabulary)
    if name == "decoder.final_layernorm.weight":
        return [_whole("model.norm.weight", tensor)]
    if not name.startswith("decoder.layers."):
        return None
    index, rest = name.removeprefix("decoder.layers.").split(".", 1)
    prefix = f"model.layers.{model.decoder.layers[int(index)].layer_number - 1}."
    if rest in _WHOLE:
        return [_whole(prefix + _WHOLE[rest], tensor)]
    if rest in _COLUMNS:
        rows, columns = tensor.shape
        shape = (rows, columns * tp.size)
        return [Piece(prefix + _COLUMNS[rest], tensor, shape, tp.rank * columns, columns=True)]
    if rest.startswith("self_attention.linear_qkv."):
        return _qkv(prefix + "self_attn.", rest.rpartition(".")[2], tensor, model.config, tp)
    if rest in ("mlp.linear_fc1.weight", "mlp.linear_fc1.bias") and model.config.gated_linear_unit:
        return list(_gate_up(prefix + "mlp.", rest.rpartition(".")[2], tensor, tp))
    return None


def _whole(name: str, tensor: Any) -> Piece:
    return Piece(name, tensor, tuple(tensor.shape), 0, replicated=True)


def _rows(name: str, tensor: Any, tp: Axis) -> Piece:
    """A column-parallel part: a rank holds consecutive rows."""
    shape = (tensor.shape[0] * tp.size, *tensor.shape[1:])
    return Piece(name, tensor, tuple(shape), tp.rank * tensor.numel())


def _vocabulary_rows(name: str, tensor: Any, tp: Axis, vocabulary: int) -> list[Piece]:
    """The rows that are tokens: a rank may hold padding at its end, or nothing else."""
    rows, width = tensor.shape
    first = tp.rank * rows
    real = tensor[: max(0, min(rows, vocabulary - first))]
    return [Piece(name, real, (vocabulary, width), first * width)] if real.numel() else []


def _qkv(prefix: str, leaf: str, tensor: Any, config: Any, tp: Axis) -> list[Piece] | None:
    """Query, key and value in a fused projection, which keeps the heads of a query group together: [q ..., k, v].

    A rank holds consecutive rows of the fused tensor, whole groups of it or, with fewer groups than ranks, a part of
    one. None for another layout (an output gate among the rows).
    """
    groups, width = config.num_query_groups, config.kv_channels
    heads = config.num_attention_heads // groups
    rows = tensor.shape[0]
    if leaf not in ("weight", "bias") or rows * tp.size != groups * (heads + 2) * width:
        return None
    low, high = tp.rank * rows, (tp.rank + 1) * rows
    size = tensor.numel() // rows  # elements of a row
    out, at = [], 0
    for group in range(groups):
        for part, count in (("q", heads * width), ("k", width), ("v", width)):
            first, end = max(at, low), min(at + count, high)
            if end > first:
                start = (group * count + first - at) * size
                shape = (groups * count, *tensor.shape[1:])
                out.append(Piece(f"{prefix}{part}_proj.{leaf}", tensor[first - low : end - low], shape, start))
            at += count
    return out


def _gate_up(prefix: str, leaf: str, tensor: Any, tp: Axis) -> Iterator[Piece]:
    half = tensor.shape[0] // 2
    yield _rows(f"{prefix}gate_proj.{leaf}", tensor[:half], tp)
    yield _rows(f"{prefix}up_proj.{leaf}", tensor[half:], tp)
