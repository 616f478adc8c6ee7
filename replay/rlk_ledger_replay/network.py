"""One forward pass of the Llama family, written as a list of operators.

Dimensions in names: P packed rows (of all sequences, padded to a row tile), H hidden, D head_dim.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from rlk_ledger_kernels.dtypes import torch_dtype
from rlk_ledger_kernels.ops.attention.cache import KVCache
from rlk_ledger_kernels.ops.attention.plan import AttentionPlan
from rlk_ledger_kernels.ops.attention.torch import attention
from rlk_ledger_kernels.ops.embedding.torch import embedding
from rlk_ledger_kernels.ops.linear.torch import PackedLinear, leaf_spans, linear, pack_linear, padded_outputs
from rlk_ledger_kernels.ops.linear_logprob.torch import PackedHead, linear_logprob, pack_head
from rlk_ledger_kernels.ops.rms_norm.torch import rms_norm
from rlk_ledger_kernels.ops.rope.table import RopeTable, frequencies, rope_table
from rlk_ledger_kernels.ops.rope.torch import rope
from rlk_ledger_kernels.ops.selected_logprob.statistics import vocabulary_tiles
from rlk_ledger_kernels.ops.swiglu.torch import swiglu
from rlk_ledger_kernels.probe import ShapesInUse
from rlk_ledger_replay.checkpoint import Checkpoint
from rlk_ledger_replay.numerics import Numerics


@dataclass(frozen=True)
class Layer:
    """One decoder layer, packed for one schedule. qk_norm_GD: one row per query and key head, or None."""

    input_norm_H: torch.Tensor
    qkv: PackedLinear
    qk_norm_GD: torch.Tensor | None
    output: PackedLinear
    mlp_norm_H: torch.Tensor
    gate_up: PackedLinear
    down: PackedLinear


class Network:
    """A checkpoint bound to numerics. Holds packed copies; never writes to the tensors it was given."""

    def __init__(self, checkpoint: Checkpoint, numerics: Numerics) -> None:
        """Round the weights to the compute dtype, widen and pack them."""
        self.config = checkpoint.config
        self.numerics = numerics
        config, tensors = checkpoint.config, checkpoint.tensors
        self.parameters = sum(tensor.numel() for tensor in tensors.values())
        compute = torch_dtype(numerics.compute)
        self.embedding_VH = tensors["model.embed_tokens.weight"].to(compute)
        self.layers = tuple(_layer(checkpoint, index, numerics) for index in range(config.layers))
        self.final_norm_H = tensors["model.norm.weight"].to(compute)
        head = tensors["model.embed_tokens.weight" if config.tied else "lm_head.weight"].to(compute)
        self.head: PackedHead = pack_head(head, numerics.logprob_contract())
        self.table: RopeTable = rope_table(
            frequencies(config.head_dim, config.rope_theta, config.rope_scaling),
            config.positions,
            numerics.rope_contract(),
        )

    def new_caches(self, blocks: int) -> list[KVCache]:
        """One empty cache per layer, each of `blocks` blocks."""
        config, numerics = self.config, self.numerics
        dtype = numerics.kv_cache or numerics.compute
        block = numerics.schedule.kv_block
        return [KVCache(blocks, config.kv_heads, block, config.head_dim, dtype) for _ in self.layers]

    def forward(
        self, ids_P: torch.Tensor, positions_P: torch.Tensor, caches: Sequence[KVCache], plan: AttentionPlan
    ) -> torch.Tensor:
        """Run the packed rows through all layers, storing their keys and values in `caches`.

        ids_P, positions_P: int64 [P], P being the plan's rows padded to a row tile.
        Returns the normalised last hidden state, [P, hidden] in the compute dtype.
        """
        norm = self.numerics.rms_norm_contract(self.config.eps)
        swiglu_contract = self.numerics.swiglu_contract()
        table = self.table.at(positions_P)
        x_PH = embedding(ids_P, self.embedding_VH)
        for layer, cache in zip(self.layers, caches, strict=True):
            mixed_PH = self._attend(rms_norm(x_PH, layer.input_norm_H, norm), layer, cache, plan, table)
            x_PH = x_PH + linear(mixed_PH, layer.output)
            gate_up = linear(rms_norm(x_PH, layer.mlp_norm_H, norm), layer.gate_up)
            gate, up = gate_up.chunk(2, dim=-1)
            x_PH = x_PH + linear(swiglu(gate, up, swiglu_contract), layer.down)
        return rms_norm(x_PH, self.final_norm_H, norm)

    def logprobs(self, hidden_NH: torch.Tensor, tokens_N: torch.Tensor) -> torch.Tensor:
        """Score one token per row; float32 [N]."""
        return linear_logprob(hidden_NH, self.head, tokens_N)

    def _attend(
        self, h_PH: torch.Tensor, layer: Layer, cache: KVCache, plan: AttentionPlan, table: RopeTable
    ) -> torch.Tensor:
        config, numerics = self.config, self.numerics
        qkv_PGD = linear(h_PH, layer.qkv).view(h_PH.shape[0], -1, config.head_dim)
        keys_end = config.heads + config.kv_heads
        qk_PGD = qkv_PGD[:, :keys_end]
        if layer.qk_norm_GD is not None:
            qk_PGD = rms_norm(qk_PGD, layer.qk_norm_GD, numerics.rms_norm_contract(config.eps))
        qk_PGD = rope(qk_PGD, table, numerics.rope_contract())
        cache.write(qk_PGD[:, config.heads :], qkv_PGD[:, keys_end:], plan)
        mixed_PGD, _ = attention(qk_PGD[:, : config.heads], cache, plan, numerics.attention_contract(config.head_dim))
        return mixed_PGD.flatten(1)


def _layer(checkpoint: Checkpoint, index: int, numerics: Numerics) -> Layer:
    config = checkpoint.config
    contract = numerics.linear_contract()
    compute = torch_dtype(numerics.compute)
    tensors: Mapping[str, torch.Tensor] = checkpoint.tensors

    def tensor(name: str) -> torch.Tensor:
        return tensors[f"model.layers.{index}.{name}"].to(compute)

    def packed(*names: str, bias: bool = False) -> PackedLinear:
        weight = torch.cat([tensor(f"{name}.weight") for name in names])
        return pack_linear(weight, contract, torch.cat([tensor(f"{name}.bias") for name in names]) if bias else None)

    qk_norm = None
    if config.qk_norm:
        q_D, k_D = tensor("self_attn.q_norm.weight"), tensor("self_attn.k_norm.weight")
        qk_norm = torch.cat((q_D.expand(config.heads, -1), k_D.expand(config.kv_heads, -1)))
    return Layer(
        input_norm_H=tensor("input_layernorm.weight"),
        qkv=packed("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", bias=config.qkv_bias),
        qk_norm_GD=qk_norm,
        output=packed("self_attn.o_proj", bias=config.output_bias),
        mlp_norm_H=tensor("post_attention_layernorm.weight"),
        gate_up=packed("mlp.gate_proj", "mlp.up_proj"),
        down=packed("mlp.down_proj"),
    )


def shapes_in_use(checkpoint: Checkpoint, numerics: Numerics) -> ShapesInUse:
    """Every product this network will run, for the probe."""
    config, schedule = checkpoint.config, numerics.schedule
    h, d, inner = config.hidden, config.head_dim, config.intermediate
    tile_widths = {end - start for start, end in vocabulary_tiles(config.vocabulary, numerics.logprob_contract())}
    pairs = {(h, (config.heads + 2 * config.kv_heads) * d), (config.heads * d, h), (h, 2 * inner), (inner, h)}
    pairs |= {(h, width) for width in tile_widths}
    pairs |= {(width, 16) for width in (h, *tile_widths)}
    if config.qk_norm:
        pairs.add((d, 16))
    products = {
        (k, start, end, padded_outputs(outputs))
        for k, outputs in pairs
        for start, end in leaf_spans(k, schedule.k_leaf)
    }
    values = -(-d // 16) * 16 + 16
    return ShapesInUse(products=frozenset(products), heads=(config.heads // config.kv_heads, d, values))


def with_row_tiles(numerics: Numerics, row_tiles: tuple[int, ...]) -> Numerics:
    """The same numerics at other row counts, which must not change a bit."""
    return replace(numerics, schedule=replace(numerics.schedule, row_tiles=row_tiles))
