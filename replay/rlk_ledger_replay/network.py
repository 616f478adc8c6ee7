"""One forward pass of the Llama family, written as a list of operators for the ranks this process holds.

Lists run over the context-parallel ranks held here; an activation is a `Stream`: one tensor, or under sequence
parallelism one per tensor-parallel rank held here, each with that rank's rows. What ranks add is gathered in rank order
and merged by the operator's own merge function; everything else is computed once per process, since replicas are equal.

Dimensions in names: P packed rows of a rank (padded to a row tile), H hidden, D head_dim, G query and key heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeAlias

import torch

from rlk_ledger_kernels.ops.attention.cache import KVCache
from rlk_ledger_kernels.ops.attention.partials import unpacked
from rlk_ledger_kernels.ops.rope.table import RopeTable
from rlk_ledger_kernels.parallel.mesh import Mesh
from rlk_ledger_replay.checkpoint import Checkpoint
from rlk_ledger_replay.departures import merged_statistics, reduced, rounded, split_attention
from rlk_ledger_replay.experts import Routes, expert_mlp
from rlk_ledger_replay.feed import Feed, RankRows
from rlk_ledger_replay.head import packed_statistics, unpacked_statistics
from rlk_ledger_replay.layout import Layout, head_span
from rlk_ledger_replay.numerics import Numerics
from rlk_ledger_replay.operators import Operators
from rlk_ledger_replay.shards import Dense, Layer, RowParallel, ShardReader

Stream: TypeAlias = "list[torch.Tensor]"
Caches: TypeAlias = "list[list[list[KVCache]]]"
"""By cp rank held here, tp rank held here, layer."""


class Network:
    """A checkpoint bound to numerics, operators and a layout. Packs copies; never writes to what it was given."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        numerics: Numerics,
        operators: Operators,
        layout: Layout,
        mesh: Mesh,
        device: str = "cpu",
    ) -> None:
        """Round the weights to the compute dtype, cut, widen and pack them."""
        self.config, self.numerics, self.operators = checkpoint.config, numerics, operators
        self.layout, self.mesh, self.device = layout, mesh, device
        self.parameters = sum(tensor.numel() for tensor in checkpoint.tensors.values())
        reader = ShardReader(checkpoint, numerics, operators, layout, mesh.tp.ranks, device)
        self.vocabulary = reader.vocabulary()
        self.embedding = reader.embedding()
        self.layers = tuple(reader.layer(index) for index in range(self.config.layers))
        self.final_norm_H = reader.tensor("model.norm.weight")
        self.head = reader.head()
        self.windows = tuple(dict.fromkeys(layer.window for layer in self.layers))
        self.table: RopeTable = numerics.rotation_table(self.config, device)

    def new_caches(self, blocks: Sequence[int]) -> Caches:
        """Empty caches; blocks: how many each cp rank held here owns."""
        return [[[self._cache(count, rank) for _ in self.layers] for rank in self.mesh.tp.ranks] for count in blocks]

    def _cache(self, blocks: int, rank: int) -> KVCache:
        span, numerics = head_span(self.config, self.layout.tp, rank), self.numerics
        return KVCache(
            blocks,
            span.kv_end - span.kv_first,
            numerics.schedule.kv_block,
            self.config.head_dim,
            numerics.kv_cache or numerics.compute,
            device=self.device,
            wide=self.operators.attention.decision.actual == "torch" and self.device == "cpu",
        )

    def forward(self, feed: Feed, caches: Caches, routes: Routes | None = None) -> list[torch.Tensor]:
        """Run the rows through all layers, storing their keys and values in `caches`.

        routes: experts to use instead of the routers' choice, or to note them in; see `experts.Routes`.
        Returns for each cp rank held here the normalised last hidden state, [P, hidden] in the compute dtype.
        """
        tables = [self.table.at(rows.positions_P) for rows in feed.ranks]
        streams = [self._embed(rows) for rows in feed.ranks]
        for index, layer in enumerate(self.layers):
            mixed = self._attend(layer, index, streams, feed, tables, caches)
            for at, rows in enumerate(feed.ranks):
                streams[at] = self._add(streams[at], self._row_parallel(mixed[at], layer.output, rows))
                hidden_PH = self._gathered(self._norm(streams[at], layer.mlp_norm_H), rows)
                streams[at] = self._add(streams[at], self._mlp(hidden_PH, layer, index, rows, routes))
        return [
            self._gathered(self._norm(stream, self.final_norm_H), rows)
            for stream, rows in zip(streams, feed.ranks, strict=True)
        ]

    def logprobs(self, hidden_NH: torch.Tensor, tokens_N: torch.Tensor) -> torch.Tensor:
        """Score one token per row; float32 [N]."""
        operator, tp = self.operators.linear_logprob, self.mesh.tp
        if tp.size == 1 and self.numerics.lse_state is None:
            return _tensor(operator.linear_logprob(hidden_NH, self.head[0], tokens_N))
        if self.numerics.lse_state is not None:
            return self._merged_logprobs(hidden_NH, tokens_N)
        parts = [packed_statistics(operator.head_statistics(hidden_NH, head, tokens_N)) for head in self.head]
        contract, total = self.numerics.logprob_contract(), self.config.vocabulary
        tiles = [-(-(end - first) // contract.schedule.vocab_tile) for first, end in self.vocabulary]
        gathered = tp.all_gather(parts, [2 * count + 3 for count in tiles], "global_vocab_shard_index")
        spans = zip(gathered, self.vocabulary, strict=True)
        return _tensor(
            operator.merge_statistics(tuple(unpacked_statistics(part, span, total) for part, span in spans), contract)
        )

    def _merged_logprobs(self, hidden_NH: torch.Tensor, tokens_N: torch.Tensor) -> torch.Tensor:
        """As `logprobs` of one rank, with the statistics of vocabulary tiles rounded before they meet."""
        operator, dtype = self.operators.linear_logprob, self.numerics.lse_state
        assert dtype is not None
        statistics = operator.head_statistics(hidden_NH, self.head[0], tokens_N)
        return _tensor(
            operator.merge_statistics((merged_statistics(statistics, dtype),), self.numerics.logprob_contract())
        )

    def scored(
        self, hidden: Sequence[torch.Tensor], feed: Feed, rows_R: torch.Tensor, tokens_R: torch.Tensor
    ) -> torch.Tensor:
        """Score the token tokens_R[i] at packed row rows_R[i]; float32 [R], on every process."""
        cp = self.mesh.cp
        holder_R, place_R = feed.holder_N[rows_R], feed.place_N[rows_R]
        of_rank = [(holder_R == rank).nonzero()[:, 0] for rank in range(cp.size)]
        parts = []
        for rank, hidden_PH in zip(cp.ranks, hidden, strict=True):
            at = of_rank[rank]
            if not at.numel():
                parts.append(torch.zeros(0, dtype=torch.float32, device=self.device))
                continue
            hidden_NH = hidden_PH.index_select(0, place_R[at].to(self.device))
            parts.append(self.logprobs(hidden_NH, tokens_R[at].to(self.device)))
        if cp.size > 1:
            parts = cp.all_gather(parts, [at.numel() for at in of_rank], "global_rank_index")
        scores_R = torch.empty(rows_R.numel(), dtype=torch.float32, device=self.device)
        scores_R[torch.cat(of_rank).to(self.device)] = torch.cat(parts)
        return scores_R

    def _embed(self, rows: RankRows) -> Stream:
        operator, tp = self.operators.embedding, self.mesh.tp
        if tp.size == 1:
            return [operator.embedding(rows.ids_P, self.embedding[0])]
        parts = [
            operator.embedding_shard(rows.ids_P, table_VH, self.vocabulary[rank][0])
            for rank, table_VH in zip(tp.ranks, self.embedding, strict=True)
        ]
        gathered = torch.stack(tp.all_gather(parts, [rows.padded] * tp.size, "global_vocab_shard_index"))
        edges = torch.tensor([first for first, _ in self.vocabulary[1:]], device=self.device)
        owner_P = torch.bucketize(rows.ids_P, edges, right=True)
        x_PH = gathered[owner_P, torch.arange(rows.padded, device=self.device)]
        return self._split(x_PH, rows)

    def _attend(
        self,
        layer: Layer,
        index: int,
        streams: Sequence[Stream],
        feed: Feed,
        tables: Sequence[RopeTable],
        caches: Caches,
    ) -> list[list[torch.Tensor]]:
        """Attention's output by cp rank and tp rank held here, [P, heads x D] before its projection."""
        queries = []
        for at, rows in enumerate(feed.ranks):
            hidden_PH = self._gathered(self._norm(streams[at], layer.input_norm_H), rows)
            queries.append(
                [
                    self._project(hidden_PH, layer, tp_at, rows, tables[at], caches[at][tp_at][index])
                    for tp_at in range(len(self.mesh.tp.ranks))
                ]
            )
        contract = self.numerics.attention_contract(self.config.head_dim, layer.window)
        if self.mesh.cp.size == 1:
            (rows,), plan = feed.ranks, feed.ranks[0].plans[layer.window]
            how = self.numerics.attention_merge
            if how is not None:
                attend = self.operators.attention
                return [
                    [
                        split_attention(attend, q, caches[0][tp_at][index], plan, contract, how, rows.count).flatten(1)
                        for tp_at, q in enumerate(queries[0])
                    ]
                ]
            attention = self.operators.attention.attention
            mixed = [
                attention(q, caches[0][tp_at][index], plan, contract)[0].flatten(1)
                for tp_at, q in enumerate(queries[0])
            ]
            return [mixed]
        by_tp = [
            self._context_parallel([q[tp_at] for q in queries], [c[tp_at][index] for c in caches], layer, feed)
            for tp_at in range(len(self.mesh.tp.ranks))
        ]
        return [[mixed[at] for mixed in by_tp] for at in range(len(feed.ranks))]

    def _project(
        self, hidden_PH: torch.Tensor, layer: Layer, tp_at: int, rows: RankRows, table: RopeTable, cache: KVCache
    ) -> torch.Tensor:
        """Rotated queries of one rank, [P, heads, D]; its keys and values go to the cache."""
        config, numerics, operators = self.config, self.numerics, self.operators
        span = head_span(config, self.layout.tp, self.mesh.tp.ranks[tp_at])
        heads, kv_heads = span.q_end - span.q_first, span.kv_end - span.kv_first
        qkv_PGD = operators.linear.linear(hidden_PH, layer.qkv[tp_at]).view(hidden_PH.shape[0], -1, config.head_dim)
        qk_PGD = qkv_PGD[:, : heads + kv_heads]
        if layer.qk_norm is not None:
            qk_PGD = operators.rms_norm.rms_norm(qk_PGD, layer.qk_norm[tp_at], numerics.rms_norm_contract(config.eps))
        qk_PGD = operators.rope.rope(qk_PGD, table, numerics.rope_contract())
        held = None if self.layout.cp == 1 else rows.rows_W
        cache.write(qk_PGD[:, heads:], qkv_PGD[:, heads + kv_heads :], rows.plans[layer.window], held)
        return _tensor(qk_PGD[:, :heads])

    def _context_parallel(
        self, queries: Sequence[torch.Tensor], caches: Sequence[KVCache], layer: Layer, feed: Feed
    ) -> list[torch.Tensor]:
        """Every rank's queries against the blocks each rank owns, merged in global block order."""
        cp, operator = self.mesh.cp, self.operators.attention
        contract = self.numerics.attention_contract(self.config.head_dim, layer.window)
        own = [q[: rows.count].contiguous() for q, rows in zip(queries, feed.ranks, strict=True)]
        q_NHD = torch.cat(cp.all_gather(own, feed.counts, "global_block_index")).index_select(0, feed.order_N)
        parts = []
        for rank, rows, cache in zip(cp.ranks, feed.ranks, caches, strict=True):
            plan = rows.plans[layer.window]
            partials = operator.attention_partials(q_NHD, cache, plan, contract, feed.owned[rank])
            parts.append(partials.packed(len(partials.tile_E)))
        gathered = cp.all_gather(parts, feed.entries[layer.window], "global_block_index")
        plan = feed.ranks[0].plans[layer.window]
        whole = [unpacked(part, plan, feed.owned[rank], feed.rows) for rank, part in enumerate(gathered)]
        out_NHD, _ = operator.merge_partials(whole, plan, contract)
        return [out_NHD.index_select(0, rows.rows_P).flatten(1) for rows in feed.ranks]

    def _mlp(self, hidden_PH: torch.Tensor, layer: Layer, index: int, rows: RankRows, routes: Routes | None) -> Stream:
        if not isinstance(layer.mlp, Dense):
            tp, pieces = self.mesh.tp, self._pieces(rows)
            return expert_mlp(hidden_PH, layer.mlp, self.numerics, self.operators, tp, rows, pieces, index, routes)
        linear, swiglu = self.operators.linear.linear, self.operators.swiglu.swiglu
        contract = self.numerics.swiglu_contract()
        inner = [swiglu(*linear(hidden_PH, gate_up).chunk(2, dim=-1), contract) for gate_up in layer.mlp.gate_up]
        return self._row_parallel(inner, layer.mlp.down, rows)

    def _row_parallel(self, inputs: Sequence[torch.Tensor], weight: RowParallel, rows: RankRows) -> Stream:
        """inputs: by tp rank held here, the columns that rank owns."""
        operator, tp = self.operators.linear, self.mesh.tp
        if tp.size == 1 and len(weight.shards) == 1:
            return [operator.linear(inputs[0], weight.shards[0])]
        if tp.size == 1:
            numerics, shares = self.numerics, inputs[0].tensor_split(len(weight.shards), dim=1)
            parts = [operator.linear(x, shard) for x, shard in zip(shares, weight.shards, strict=True)]
            return [reduced(parts, numerics.reduce_dtype or numerics.compute, weight.bias_O, numerics.compute)]
        parts = [operator.linear_partial(x, shard) for x, shard in zip(inputs, weight.shards, strict=True)]
        gathered = tp.all_gather(parts, [rows.padded] * tp.size, "global_rank_index")
        contract = self.numerics.linear_contract()
        return [
            operator.merge_partials([part[first:end] for part in gathered], contract, weight.bias_O)
            for first, end in self._pieces(rows)
        ]

    def _norm(self, stream: Stream, weight_H: torch.Tensor) -> Stream:
        contract = self.numerics.rms_norm_contract(self.config.eps)
        return [self.operators.rms_norm.rms_norm(x, weight_H, contract) for x in stream]

    def _add(self, stream: Stream, update: Stream) -> Stream:
        dtype = self.numerics.residual
        if dtype is None:
            return [x + more for x, more in zip(stream, update, strict=True)]
        wide = [x.to(torch.float32) + more.to(torch.float32) for x, more in zip(stream, update, strict=True)]
        return [rounded(x, dtype) for x in wide]

    def _pieces(self, rows: RankRows) -> list[tuple[int, int]]:
        """The rows of each member of a stream."""
        return [rows.pieces[rank] for rank in self.mesh.tp.ranks] if self.layout.sp else [(0, rows.padded)]

    def _split(self, x_PH: torch.Tensor, rows: RankRows) -> Stream:
        return [x_PH[first:end] for first, end in self._pieces(rows)]

    def _gathered(self, stream: Stream, rows: RankRows) -> torch.Tensor:
        """All rows of a stream."""
        if not self.layout.sp:
            return stream[0]
        lengths = [end - first for first, end in rows.pieces]
        return torch.cat(self.mesh.tp.all_gather(stream, lengths, "global_rank_index"))


def _tensor(found: torch.Tensor) -> torch.Tensor:
    """What an operator returned; its module is chosen at run time, so its type is not known before."""
    return found


def with_row_tiles(numerics: Numerics, row_tiles: tuple[int, ...]) -> Numerics:
    """The same numerics at other row counts, which must not change a bit."""
    return replace(numerics, schedule=replace(numerics.schedule, row_tiles=row_tiles))
