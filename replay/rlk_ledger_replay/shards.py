"""The weights of the ranks this process holds: cut as the layout says, rounded to the compute dtype and packed.

O outputs, K contraction, H hidden, D head_dim, V vocabulary. A tuple in a layer has one entry per tp rank held here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from rlk_ledger_kernels.dtypes import torch_dtype
from rlk_ledger_replay.checkpoint import Checkpoint
from rlk_ledger_replay.experts import Experts, pack_experts
from rlk_ledger_replay.layout import Layout, head_span, vocabulary_spans
from rlk_ledger_replay.numerics import Numerics
from rlk_ledger_replay.operators import Operators

Packed = Any
"""What the deciding backend's `pack_*` returned: of that backend's own type."""


@dataclass(frozen=True)
class RowParallel:
    """A weight whose contraction is cut over ranks. bias_O is added once, after the merge; a whole weight holds it."""

    shards: tuple[Packed, ...]
    bias_O: torch.Tensor | None


@dataclass(frozen=True)
class Dense:
    """A gated MLP: gate and up side by side, cut by intermediate column; down cut by its contraction."""

    gate_up: tuple[Packed, ...]
    down: RowParallel


@dataclass(frozen=True)
class Layer:
    """One decoder layer. qk_norm: per tp rank [heads, D], one row per query and key head, or None."""

    window: int | None
    input_norm_H: torch.Tensor
    qkv: tuple[Packed, ...]
    qk_norm: tuple[torch.Tensor, ...] | None
    output: RowParallel
    mlp_norm_H: torch.Tensor
    mlp: Dense | Experts


class ShardReader:
    """Cuts the tensors of one checkpoint for the tp ranks of this process."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        numerics: Numerics,
        operators: Operators,
        layout: Layout,
        ranks: tuple[int, ...],
        device: str,
    ) -> None:
        """ranks: the tp ranks held here."""
        self.config = checkpoint.config
        self._tensors: Mapping[str, torch.Tensor] = checkpoint.tensors
        self._numerics = numerics
        self._operators = operators
        self._tp = layout.tp
        self._ranks = ranks
        self._device = device
        self._dtype = torch_dtype(numerics.compute)

    def tensor(self, name: str) -> torch.Tensor:
        """A tensor in the compute dtype on the device."""
        return self._tensors[name].to(device=self._device, dtype=self._dtype)

    def vocabulary(self) -> tuple[tuple[int, int], ...]:
        """[first, end) of the token ids of every tp rank."""
        return vocabulary_spans(self.config.vocabulary, self._numerics.schedule.vocab_tile, self._tp)

    def embedding(self) -> tuple[torch.Tensor, ...]:
        """The rows of the embedding [V / tp, H] that each rank holds."""
        table_VH = self.tensor("model.embed_tokens.weight")
        return tuple(table_VH[slice(*self.vocabulary()[rank])] for rank in self._ranks)

    def head(self) -> tuple[Packed, ...]:
        """The packed head of each rank, cut at vocabulary tiles."""
        head_VH = self.tensor("model.embed_tokens.weight" if self.config.tied else "lm_head.weight")
        contract, total = self._numerics.logprob_contract(), self.config.vocabulary
        spans = [self.vocabulary()[rank] for rank in self._ranks]
        pack = self._operators.linear_logprob.pack_head
        return tuple(pack(head_VH[first:end], contract, first=first, vocabulary=total) for first, end in spans)

    def layer(self, index: int) -> Layer:
        """One layer."""
        config, at = self.config, f"model.layers.{index}"
        attention = f"{at}.self_attn"
        sparse = config.experts is not None and index in config.experts.layers
        return Layer(
            window=config.windows[index],
            input_norm_H=self.tensor(f"{at}.input_layernorm.weight"),
            qkv=tuple(self._qkv(attention, rank) for rank in self._ranks),
            qk_norm=tuple(self._qk_norm(attention, rank) for rank in self._ranks) if config.qk_norm else None,
            output=self._row_parallel(f"{attention}.o_proj", config.output_bias),
            mlp_norm_H=self.tensor(f"{at}.post_attention_layernorm.weight"),
            mlp=self._experts(f"{at}.mlp") if sparse else self._dense(f"{at}.mlp"),
        )

    def _experts(self, at: str) -> Experts:
        assert self.config.experts is not None
        tp, ranks = self._tp, self._ranks
        return pack_experts(self.tensor, at, self.config.experts, self._numerics, self._operators, tp, ranks)

    def _dense(self, at: str) -> Dense:
        wide = self.config.intermediate // self._tp
        spans = [slice(rank * wide, (rank + 1) * wide) for rank in self._ranks]
        gate_IH, up_IH = self.tensor(f"{at}.gate_proj.weight"), self.tensor(f"{at}.up_proj.weight")
        return Dense(
            gate_up=tuple(self._pack(torch.cat((gate_IH[span], up_IH[span]))) for span in spans),
            down=self._row_parallel(f"{at}.down_proj", biased=False),
        )

    def _pack(self, weight_OK: torch.Tensor, bias_O: torch.Tensor | None = None) -> Packed:
        return self._operators.linear.pack_linear(weight_OK, self._numerics.linear_contract(), bias_O)

    def _row_parallel(self, name: str, biased: bool) -> RowParallel:
        weight_OK = self.tensor(f"{name}.weight")
        bias_O = self.tensor(f"{name}.bias") if biased else None
        ranks = self._numerics.reduce_ranks
        if self._tp == 1 and ranks == 1:
            return RowParallel((self._pack(weight_OK, bias_O),), bias_O)
        if self._tp == 1:
            wide = replace(self._numerics.linear_contract(), output="float32")
            parts = weight_OK.tensor_split(ranks, dim=1)
            return RowParallel(tuple(self._operators.linear.pack_linear(part, wide) for part in parts), bias_O)
        pack, contract = self._operators.linear.pack_row_shard, self._numerics.linear_contract()
        return RowParallel(tuple(pack(weight_OK, contract, self._tp, rank) for rank in self._ranks), bias_O)

    def _qkv(self, at: str, rank: int) -> Packed:
        spans = self._projections(rank)
        weight_OK = torch.cat([self.tensor(f"{at}.{name}.weight")[span] for name, span in spans.items()])
        if not self.config.qkv_bias:
            return self._pack(weight_OK)
        return self._pack(
            weight_OK, torch.cat([self.tensor(f"{at}.{name}.bias")[span] for name, span in spans.items()])
        )

    def _projections(self, rank: int) -> dict[str, slice]:
        span, d = head_span(self.config, self._tp, rank), self.config.head_dim
        queries, keys = slice(span.q_first * d, span.q_end * d), slice(span.kv_first * d, span.kv_end * d)
        return {"q_proj": queries, "k_proj": keys, "v_proj": keys}

    def _qk_norm(self, at: str, rank: int) -> torch.Tensor:
        span = head_span(self.config, self._tp, rank)
        q_D, k_D = self.tensor(f"{at}.q_norm.weight"), self.tensor(f"{at}.k_norm.weight")
        return torch.cat((q_D.expand(span.q_end - span.q_first, -1), k_D.expand(span.kv_end - span.kv_first, -1)))
