"""The reference decoder with an adapter applied unmerged: y = W x + s B (A x).

Each product runs on the decoder's own linear operator, so a row's bits depend on no other row here either.

P packed rows, O outputs, r rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from rlk_ledger_kernels.errors import ContractError
from rlk_ledger_kernels.ops.linear.torch import leaf_spans, padded_outputs
from rlk_ledger_kernels.probe import Admission, admit
from rlk_ledger_kernels.session import Bound
from rlk_ledger_replay.adapters import Adapter, LowRank
from rlk_ledger_replay.checkpoint import Checkpoint
from rlk_ledger_replay.decoder import Decoder
from rlk_ledger_replay.network import Network, with_row_tiles
from rlk_ledger_replay.numerics import Numerics
from rlk_ledger_replay.shapes import shapes_in_use
from rlk_ledger_replay.shards import Dense, Layer, RowParallel


@dataclass(frozen=True)
class Part:
    """An adapter's packed pair and the outputs [first, end) of the projection it adds to."""

    a: Any
    b: Any
    first: int
    end: int


@dataclass(frozen=True)
class Extended:
    """A packed weight with the adapters of the projections it is made of."""

    base: Any
    parts: tuple[Part, ...]


class AdaptedLinear:
    """A bound linear operator that also takes extended weights; everything else is the operator's own."""

    def __init__(self, bound: Bound, scale: float) -> None:
        """scale: s."""
        self._bound, self._scale = bound, scale

    def __getattr__(self, name: str) -> Any:
        """The operator's own."""
        return getattr(self._bound, name)

    def linear(self, x_PK: torch.Tensor, packed: Any) -> torch.Tensor:
        """W x, plus s B (A x) where the weight is extended; each product and sum in the output's dtype."""
        if not isinstance(packed, Extended):
            plain: torch.Tensor = self._bound.linear(x_PK, packed)
            return plain
        y_PO: torch.Tensor = self._bound.linear(x_PK, packed.base).clone()
        for part in packed.parts:
            inner_Pr = self._bound.linear(x_PK, part.a)
            added = self._bound.linear(inner_Pr, part.b) * self._scale
            y_PO[:, part.first : part.end] += added
        return y_PO


class AdaptedNetwork(Network):
    """A network whose projections carry their adapters; one tensor-parallel rank."""

    def adapt(self, adapter: Adapter) -> AdaptedNetwork:
        """Packs the adapter's pairs beside the weights they add to; returns itself."""
        operators = self.operators
        self.layers = tuple(self._adapted(layer, index, adapter) for index, layer in enumerate(self.layers))
        linear: Any = AdaptedLinear(operators.linear, adapter.scale)
        self.operators = replace(operators, linear=linear)
        return self

    def _adapted(self, layer: Layer, index: int, adapter: Adapter) -> Layer:
        config, at = self.config, f"model.layers.{index}"
        q, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
        names = [(f"{at}.self_attn.q_proj", q), (f"{at}.self_attn.k_proj", kv), (f"{at}.self_attn.v_proj", kv)]
        qkv = self._extended(layer.qkv[0], names, adapter)
        output = self._row_parallel_adapted(layer.output, f"{at}.self_attn.o_proj", adapter)
        if not isinstance(layer.mlp, Dense):
            return replace(layer, qkv=(qkv,), output=output)
        wide = config.intermediate
        gate_up = [(f"{at}.mlp.gate_proj", wide), (f"{at}.mlp.up_proj", wide)]
        mlp = Dense(
            gate_up=(self._extended(layer.mlp.gate_up[0], gate_up, adapter),),
            down=self._row_parallel_adapted(layer.mlp.down, f"{at}.mlp.down_proj", adapter),
        )
        return replace(layer, qkv=(qkv,), output=output, mlp=mlp)

    def _row_parallel_adapted(self, weight: RowParallel, name: str, adapter: Adapter) -> RowParallel:
        return replace(weight, shards=(self._extended(weight.shards[0], [(name, self.config.hidden)], adapter),))

    def _extended(self, base: Any, names: Sequence[tuple[str, int]], adapter: Adapter) -> Any:
        parts, first = [], 0
        for name, outputs in names:
            if name in adapter.pairs:
                parts.append(self._part(adapter.pairs[name], first, first + outputs))
            first += outputs
        return Extended(base, tuple(parts)) if parts else base

    def _part(self, pair: LowRank, first: int, end: int) -> Part:
        pack, contract = self.operators.linear.pack_linear, self.numerics.linear_contract()
        dtype = self.layers[0].input_norm_H.dtype
        a_rK, b_Or = (tensor.to(device=self.device, dtype=dtype) for tensor in (pair.a_rK, pair.b_Or))
        return Part(pack(a_rK, contract), pack(b_Or, contract), first, end)


class AdaptedDecoder(Decoder):
    """A decoder over base weights with an unmerged adapter, on one rank of this process."""

    def __init__(self, checkpoint: Checkpoint, adapter: Adapter, numerics: Numerics | None = None) -> None:
        """See Decoder. Raises ContractError when the model has more than one rank."""
        super().__init__(checkpoint, numerics)
        if self.layout.tp > 1 or self.layout.cp > 1:
            raise ContractError("an unmerged adapter runs on one rank; merge it to cut the model")
        self.adapter = adapter
        self._adapted: dict[tuple[int, ...], Network] = {}

    def with_numerics(self, numerics: Numerics) -> AdaptedDecoder:
        """The same weights and adapter under other numerics."""
        return AdaptedDecoder(self.checkpoint, self.adapter, numerics)

    def admission(self) -> Admission:
        """What the probe allows, the low-rank products included."""
        if not (self.operators.on_blas and self.device == "cpu"):
            return super().admission()
        leaf = self.numerics.leaves().linear
        pairs = {tuple(tensor.shape) for pair in self.adapter.pairs.values() for tensor in (pair.a_rK, pair.b_Or)}
        more = {(k, start, end, padded_outputs(o)) for o, k in pairs for start, end in leaf_spans(k, leaf)}
        shapes = shapes_in_use(self.checkpoint.config, self.numerics, self.layout)
        return admit(replace(shapes, products=shapes.products | more), self.numerics.schedule)

    def network(self, admission: Admission) -> Network:
        """The packed network with its adapter, made once for each row count."""
        tiles = admission.row_tiles
        if tiles not in self._adapted:
            with torch.no_grad():
                numerics = with_row_tiles(self.numerics, tiles)
                made = AdaptedNetwork(self.checkpoint, numerics, self.operators, self.layout, self.mesh, self.device)
                self._adapted[tiles] = made.adapt(self.adapter)
        return self._adapted[tiles]
