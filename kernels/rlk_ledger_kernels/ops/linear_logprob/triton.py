"""linear_logprob, Triton: head product and log-sum-exp in one kernel, no [rows, vocabulary] intermediate.

Forward: a program takes a block of rows and one vocabulary tile, walks the tile in blocks of columns from the first to
the last, sums each product over K in blocks in order, and keeps (max, sum) of the tile; the tiles of a row are merged
as in selected_logprob. Backward: for a few tiles at a time, d = grad / temperature * (onehot - softmax) is recomputed
into a scratch of those tiles; d @ weight continues each row's running sum in tile order, d^T @ hidden sums tokens in
blocks in order. Programs follow row blocks first, so those that run together share a tile of the weight. Block shapes
depend on the operands' dtype and on the tile alone; rows never meet, and there are no atomics. The leaves of the
schedule belong to the torch backend: here K is one run.

Legend: N rows, K hidden size, V rows of the head held here, W columns of the tiles of one round.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

from rlk_ledger_kernels.dtypes import torch_dtype
from rlk_ledger_kernels.errors import OperandError
from rlk_ledger_kernels.ops.linear_logprob.contract import LogprobContract
from rlk_ledger_kernels.ops.linear_logprob.triton_kernels import (
    hidden_kernel,
    slope_kernel,
    statistics_kernel,
    weight_kernel,
)
from rlk_ledger_kernels.ops.selected_logprob.statistics import Statistics, check_tokens, part_end, part_tiles
from rlk_ledger_kernels.ops.selected_logprob.triton import ignore_index, scale
from rlk_ledger_kernels.ops.vocab_parallel_logprob.triton import merge_statistics, normaliser
from rlk_ledger_kernels.triton_device import interpreted
from rlk_ledger_kernels.triton_language import TRITON_DTYPES, launcher

__all__ = [
    "PackedHead",
    "head_backward",
    "head_statistics",
    "linear_logprob",
    "linear_logprob_backward",
    "merge_statistics",
    "normaliser",
    "pack_head",
]

Normaliser = tuple[torch.Tensor, torch.Tensor]
"""(largest logit, sum of exp((z - largest) / temperature)) of each row over the whole vocabulary."""

_ROUND_COLUMNS = 8192
"""Columns of `d` that exist at once in the backward pass; a speed setting, no sum depends on it."""


@dataclass(frozen=True)
class PackedHead:
    """The rows first..end-1 of a language-model head, contiguous, in the dtype of the product's operands."""

    weight_VK: torch.Tensor
    first: int
    end: int
    vocabulary: int
    contract: LogprobContract


@dataclass(frozen=True)
class _Blocks:
    """Shape of a product: rows, columns and K of one block, warps and stages of the pipeline."""

    rows: int
    columns: int
    k: int
    num_warps: int
    num_stages: int


def pack_head(
    weight_VK: torch.Tensor, contract: LogprobContract, first: int = 0, vocabulary: int | None = None
) -> PackedHead:
    """Make a head's weight contiguous, in `contract.head` when that is declared.

    weight_VK: [V, K], the rows of tokens first..first+V-1; those from `vocabulary` on are padding. vocabulary: the
    declared size, by default where these rows end. Raises OperandError for a cut inside a vocabulary tile.
    """
    if weight_VK.dim() != 2:
        raise OperandError(f"linear_logprob: a head is [vocabulary, hidden], got shape {tuple(weight_VK.shape)}")
    size = first + weight_VK.shape[0] if vocabulary is None else vocabulary
    end = part_end(first, weight_VK.shape[0], size, contract)
    return PackedHead(_operand(weight_VK, contract), first, end, size, contract)


def linear_logprob(hidden_NK: torch.Tensor, head: PackedHead, tokens_N: torch.Tensor) -> torch.Tensor:
    """Score one token per row from hidden states: log softmax(hidden @ weight^T / temperature)[token].

    hidden_NK: [N, K], of the head's dtype or rounded to `contract.head`. tokens_N: int64 [N]. head: of the whole
    vocabulary. Returns float32 [N] (nats). Raises OperandError when shapes or dtypes differ or the head is a shard.
    """
    return merge_statistics((head_statistics(hidden_NK, head, tokens_N),), head.contract)


def head_statistics(hidden_NK: torch.Tensor, head: PackedHead, tokens_N: torch.Tensor) -> Statistics:
    """The statistics of a head or of a shard of one, to be merged with those of the other shards."""
    hidden_NK = _hidden(hidden_NK, head)
    rows, k = hidden_NK.shape
    contract, width = head.contract, head.end - head.first
    ignored_N = check_tokens(tokens_N, rows, head.vocabulary, contract)
    owned_N = (tokens_N >= head.first) & (tokens_N < head.end)
    tiles = len(part_tiles(head.first, head.end, contract))
    top_NT = torch.empty((rows, tiles), dtype=torch.float32, device=hidden_NK.device)
    sum_NT = torch.empty_like(top_NT)
    chosen_N = torch.zeros(rows, dtype=torch.float32, device=hidden_NK.device)
    blocks = _blocks(hidden_NK.dtype, contract.schedule.vocab_tile)
    row_blocks = triton.cdiv(rows, blocks.rows)
    if rows and tiles:
        launcher(statistics_kernel, (row_blocks * tiles,))(
            hidden_NK,
            head.weight_VK,
            tokens_N.contiguous(),
            top_NT,
            sum_NT,
            chosen_N,
            rows,
            width,
            k,
            hidden_NK.stride(0),
            head.weight_VK.stride(0),
            row_blocks,
            tiles,
            head.first,
            scale(contract),
            TILE=contract.schedule.vocab_tile,
            LOGITS=TRITON_DTYPES[torch_dtype(contract.logits)],
            **_options(blocks),
        )
    return Statistics(head.first, head.end, head.vocabulary, top_NT, sum_NT, chosen_N, owned_N, ignored_N)


def linear_logprob_backward(
    grad_N: torch.Tensor, hidden_NK: torch.Tensor, head: PackedHead, tokens_N: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients of the hidden states [N, K] and of the weight [V, K], float32.

    d = grad / temperature * (onehot - softmax) is rounded to the operands' dtype, as products of that dtype need it.
    """
    normal = normaliser((head_statistics(hidden_NK, head, tokens_N),), head.contract)
    return head_backward(grad_N, hidden_NK, head, tokens_N, normal)


def head_backward(
    grad_N: torch.Tensor,
    hidden_NK: torch.Tensor,
    head: PackedHead,
    tokens_N: torch.Tensor,
    normal: Normaliser,
    carry_NK: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Like `linear_logprob_backward` for a shard of a head.

    normal: what `normaliser` says of the whole vocabulary. carry_NK: the hidden gradient of the shards before this one,
    which is continued, so that shards taken in order give the bits of one.
    """
    hidden_NK = _hidden(hidden_NK, head)
    rows, k = hidden_NK.shape
    tile = head.contract.schedule.vocab_tile
    together = max(1, _ROUND_COLUMNS // tile) * tile
    if carry_NK is None:
        grad_hidden_NK = hidden_NK.new_zeros((rows, k), dtype=torch.float32)
    else:
        grad_hidden_NK = carry_NK.clone(memory_format=torch.contiguous_format)
    grad_weight_VK = torch.zeros(head.weight_VK.shape, dtype=torch.float32, device=hidden_NK.device)
    if rows:
        for offset in range(0, head.end - head.first, together):
            stop = min(offset + together, head.end - head.first)
            d_NW = _slopes(grad_N, hidden_NK, head, tokens_N, normal, offset, stop)
            _continue_hidden(d_NW, head.weight_VK[offset:stop], grad_hidden_NK, tile)
            _weight_rows(d_NW, hidden_NK, tokens_N, grad_weight_VK[offset:stop], head.contract)
    if head.contract.ignore_index is not None:
        grad_hidden_NK.masked_fill_((tokens_N == head.contract.ignore_index)[:, None], 0.0)
    return grad_hidden_NK, grad_weight_VK


def _slopes(
    grad_N: torch.Tensor,
    hidden_NK: torch.Tensor,
    head: PackedHead,
    tokens_N: torch.Tensor,
    normal: Normaliser,
    offset: int,
    stop: int,
) -> torch.Tensor:
    rows, contract = hidden_NK.shape[0], head.contract
    d_NW = torch.empty((rows, stop - offset), dtype=hidden_NK.dtype, device=hidden_NK.device)
    blocks = _blocks(hidden_NK.dtype, contract.schedule.vocab_tile)
    row_blocks = triton.cdiv(rows, blocks.rows)
    launcher(slope_kernel, (row_blocks * triton.cdiv(stop - offset, blocks.columns),))(
        hidden_NK,
        head.weight_VK,
        tokens_N.contiguous(),
        grad_N.contiguous(),
        normal[0].contiguous(),
        normal[1].contiguous(),
        d_NW,
        rows,
        stop,
        hidden_NK.shape[1],
        hidden_NK.stride(0),
        head.weight_VK.stride(0),
        d_NW.shape[1],
        row_blocks,
        offset,
        head.first,
        ignore_index(contract),
        float(contract.temperature),
        scale(contract),
        LOGITS=TRITON_DTYPES[torch_dtype(contract.logits)],
        OUTPUT=TRITON_DTYPES[hidden_NK.dtype],
        **_options(blocks),
    )
    return d_NW


def _continue_hidden(d_NW: torch.Tensor, weight_WK: torch.Tensor, out_NK: torch.Tensor, tile: int) -> None:
    rows, k = out_NK.shape
    blocks = _blocks(d_NW.dtype, tile)
    row_blocks = triton.cdiv(rows, blocks.rows)
    launcher(hidden_kernel, (row_blocks * triton.cdiv(k, blocks.columns),))(
        d_NW,
        weight_WK,
        out_NK,
        rows,
        d_NW.shape[1],
        k,
        d_NW.stride(0),
        weight_WK.stride(0),
        row_blocks,
        TILE=tile,
        PER_TILE=triton.cdiv(tile, blocks.k),
        **_options(blocks),
    )


def _weight_rows(
    d_NW: torch.Tensor, hidden_NK: torch.Tensor, tokens_N: torch.Tensor, out_WK: torch.Tensor, contract: LogprobContract
) -> None:
    rows, width = d_NW.shape
    blocks = _blocks(d_NW.dtype, contract.schedule.vocab_tile)
    width_blocks = triton.cdiv(width, blocks.rows)
    launcher(weight_kernel, (width_blocks * triton.cdiv(hidden_NK.shape[1], blocks.columns),))(
        d_NW,
        hidden_NK,
        tokens_N.contiguous(),
        out_WK,
        rows,
        width,
        hidden_NK.shape[1],
        d_NW.stride(0),
        hidden_NK.stride(0),
        width_blocks,
        ignore_index(contract),
        **_options(blocks),
    )


def _blocks(dtype: torch.dtype, tile: int) -> _Blocks:
    """Fixed by the dtype and by the vocabulary tile: never by the number of rows."""
    columns = min(128, max(16, triton.next_power_of_2(tile)))
    if interpreted():  # which is fast on large blocks
        return _Blocks(rows=256, columns=columns, k=64, num_warps=4, num_stages=1)
    if dtype == torch.float32:
        return _Blocks(rows=64, columns=min(64, columns), k=32, num_warps=4, num_stages=2)
    return _Blocks(rows=128, columns=columns, k=64, num_warps=8, num_stages=3)


def _options(blocks: _Blocks) -> dict[str, object]:
    return {
        "ROWS": blocks.rows,
        "COLUMNS": blocks.columns,
        "BLOCK_K": blocks.k,
        "num_warps": blocks.num_warps,
        "num_stages": blocks.num_stages,
        "enable_fp_fusion": False,
    }


def _operand(x: torch.Tensor, contract: LogprobContract) -> torch.Tensor:
    return (x if contract.head is None else x.to(torch_dtype(contract.head))).contiguous()


def _hidden(hidden_NK: torch.Tensor, head: PackedHead) -> torch.Tensor:
    hidden_NK = _operand(hidden_NK, head.contract)
    k, dtype = head.weight_VK.shape[1], head.weight_VK.dtype
    if hidden_NK.dim() != 2 or hidden_NK.shape[1] != k or hidden_NK.dtype != dtype:
        raise OperandError(
            f"linear_logprob: hidden states are {hidden_NK.dtype} {tuple(hidden_NK.shape)}, the head needs {dtype} "
            f"[rows, {k}]; set contract.head to round both to one dtype"
        )
    return hidden_NK
