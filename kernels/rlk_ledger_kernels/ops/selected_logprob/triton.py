"""selected_logprob, Triton: one pass over the logits, (max, sum) per vocabulary tile, merged row by row.

A line is one vocabulary tile of one row; a program of the first kernel takes a run of lines and holds the next ones in
flight while it reduces the present ones. A line is reduced alone, at a shape the tile's width fixes, so how lines are
dealt to programs, which rank holds them and what else is in the batch change no bit. The second kernel adds the tile
sums of a row along one tree over the tiles in the contract's order. Programs talk through memory between two launches:
no atomics.

Legend: N rows, V columns, T tiles, L lines of one step.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from rlk_ledger_kernels.dtypes import torch_dtype
from rlk_ledger_kernels.errors import OperandError
from rlk_ledger_kernels.ops.selected_logprob.contract import LogprobContract
from rlk_ledger_kernels.ops.selected_logprob.statistics import check_token_shape, check_tokens, part_end, part_tiles
from rlk_ledger_kernels.triton_device import interpreted
from rlk_ledger_kernels.triton_language import TRITON_DTYPES, launcher, round_to, rounded_through

_STEP_ELEMENTS = 2048
"""Logits one step of a program reduces: 64 to a thread of one warp, loaded 16 bytes at a time."""

_STEPS = 8
"""Steps of a program, each loaded while the one before is reduced."""

_ALIGNED = 16
"""Rows start and end at multiples of this many elements, so that every layout of a dtype is one layout."""

_FOLD = 64 if interpreted() else 1
"""The interpreter is fast on large blocks; lines and rows are reduced alone in blocks of any size."""

_MERGE_ELEMENTS = 1024
_GRADIENT_ELEMENTS = 4096


@triton.jit(do_not_specialize=["lines"])
def _tile_kernel(
    logits_ptr,
    top_ptr,
    sum_ptr,
    stride,
    width,
    padded,
    tiles,
    lines,
    scale,
    TILE: tl.constexpr,
    COLUMNS: tl.constexpr,
    LINES: tl.constexpr,
    STEPS: tl.constexpr,
    CUT: tl.constexpr,
    ROUND: tl.constexpr,
    LOGITS: tl.constexpr,
):
    first = tl.program_id(0) * (LINES * STEPS)
    column = tl.arange(0, COLUMNS)
    line = first + tl.arange(0, LINES)
    at = (line % tiles)[:, None] * TILE + column[None, :]
    row_ptr = logits_ptr + (line // tiles).to(tl.int64)[:, None] * stride
    ahead = tl.load(row_ptr + at, mask=(at < padded) & (line < lines)[:, None], other=float("-inf"))
    for step in range(STEPS):
        x = ahead.to(tl.float32)
        next_line = line + LINES
        next_at = (next_line % tiles)[:, None] * TILE + column[None, :]
        next_ptr = logits_ptr + (next_line // tiles).to(tl.int64)[:, None] * stride
        wanted = (next_line < lines) & (step + 1 < STEPS)
        ahead = tl.load(next_ptr + next_at, mask=(next_at < padded) & wanted[:, None], other=float("-inf"))
        if ROUND:
            x = rounded_through(x, LOGITS)
        if CUT:
            # Columns of the next tile, and of padding, are not this tile's.
            x = tl.where((at < width) & (column < TILE)[None, :], x, float("-inf"))
        top = tl.max(x, axis=1)
        anchor = tl.where(top == float("-inf"), 0.0, top)
        total = tl.sum(tl.exp2((x - anchor[:, None]) * scale), axis=1)
        tl.store(top_ptr + line, top, mask=line < lines)
        tl.store(sum_ptr + line, total, mask=line < lines)
        line = next_line
        at = next_at


@triton.jit(do_not_specialize=["rows"])
def _merge_kernel(
    top_ptr,
    sum_ptr,
    chosen_ptr,
    chosen_stride,
    tokens_ptr,
    out_top_ptr,
    out_total_ptr,
    out_ptr,
    rows,
    tiles,
    vocabulary,
    ignored_id,
    temperature,
    scale,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    REVERSE: tl.constexpr,
    PICK: tl.constexpr,
    LOGITS: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    real = row < rows
    place = tl.arange(0, COLUMNS)
    inside = real[:, None] & (place < tiles)[None, :]
    tile = tiles - 1 - place if REVERSE else place
    at = row.to(tl.int64)[:, None] * tiles + tile[None, :]
    top = tl.load(top_ptr + at, mask=inside, other=float("-inf"))
    total = tl.load(sum_ptr + at, mask=inside, other=0.0)
    largest = tl.max(top, axis=1)
    anchor = tl.where(largest == float("-inf"), 0.0, largest)
    whole = tl.sum(tl.where(inside, total * tl.exp2((top - anchor[:, None]) * scale), 0.0), axis=1)
    tl.store(out_top_ptr + row, largest, mask=real)
    tl.store(out_total_ptr + row, whole, mask=real)
    if PICK:
        token = tl.load(tokens_ptr + row, mask=real, other=0).to(tl.int64)
        known = real & (token >= 0) & (token < vocabulary)
        chosen_at = row.to(tl.int64) * chosen_stride + token
        chosen = tl.load(chosen_ptr + chosen_at, mask=known, other=float("nan")).to(tl.float32)
        chosen = rounded_through(chosen, LOGITS)
    else:
        chosen = tl.load(chosen_ptr + row, mask=real, other=0.0)
    score = tl.div_rn(chosen - largest, tl.zeros_like(largest) + temperature) - tl.log(tl.where(real, whole, 1.0))
    if PICK:
        score = tl.where((token == ignored_id) & (ignored_id < 0), 0.0, score)
    tl.store(out_ptr + row, score, mask=real)


@triton.jit(do_not_specialize=["rows"])
def _gradient_kernel(
    logits_ptr,
    tokens_ptr,
    grad_ptr,
    top_ptr,
    total_ptr,
    out_ptr,
    rows,
    stride,
    width,
    columns,
    first,
    ignored_id,
    temperature,
    scale,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    LOGITS: tl.constexpr,
    OUTPUT: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    real = row < rows
    inside = real[:, None] & (column < columns)[None, :]
    x_at = row.to(tl.int64)[:, None] * stride + column[None, :]
    x = rounded_through(tl.load(logits_ptr + x_at, mask=inside, other=float("-inf")).to(tl.float32), LOGITS)
    token = tl.load(tokens_ptr + row, mask=real, other=0).to(tl.int64)
    top = tl.load(top_ptr + row, mask=real, other=0.0)
    total = tl.load(total_ptr + row, mask=real, other=1.0)
    slope = tl.load(grad_ptr + row, mask=real, other=0.0).to(tl.float32)
    slope = tl.div_rn(slope, tl.zeros_like(slope) + temperature)
    anchor = tl.where(top == float("-inf"), 0.0, top)
    share = tl.div_rn(tl.exp2((x - anchor[:, None]) * scale), tl.zeros_like(x) + total[:, None])
    out = tl.where(column[None, :] == (token - first)[:, None], 1.0 - share, -share) * slope[:, None]
    counted = ((token == ignored_id) & (ignored_id < 0)) == 0
    out = tl.where((column < width)[None, :] & counted[:, None], out, 0.0)
    out_at = row.to(tl.int64)[:, None] * columns + column[None, :]
    tl.store(out_ptr + out_at, round_to(out, OUTPUT), mask=inside)


def selected_logprob(
    logits_NV: torch.Tensor, tokens_N: torch.Tensor, contract: LogprobContract, vocabulary: int | None = None
) -> torch.Tensor:
    """Score one token per row from logits that already exist: log softmax(z / temperature)[token].

    logits_NV: [N, V], rounded to `contract.logits` first; read in place when rows are multiples of 16 elements from an
    aligned start, else copied once. tokens_N: int64 [N]. vocabulary: columns beyond it are padding. Returns float32
    [N] (nats), +0 for ignored rows; a row that holds NaN, +inf or nothing but -inf scores NaN, and on a GPU so does one
    whose token is outside the vocabulary (on a CPU that raises OperandError).
    """
    size = logits_NV.shape[-1] if vocabulary is None else vocabulary
    return _scored(logits_NV, tokens_N, contract, size)[0]


def selected_logprob_backward(
    grad_N: torch.Tensor,
    logits_NV: torch.Tensor,
    tokens_N: torch.Tensor,
    contract: LogprobContract,
    vocabulary: int | None = None,
) -> torch.Tensor:
    """The gradient of the logits: grad / temperature * (onehot(token) - softmax(z / temperature)).

    Returns [N, V] in the logits' dtype; ignored rows and padding columns are exactly 0.
    """
    size = logits_NV.shape[-1] if vocabulary is None else vocabulary
    _, top_N, total_N = _scored(logits_NV, tokens_N, contract, size)
    return columns_backward(grad_N, logits_NV, 0, size, tokens_N, (top_N, total_N), contract)


def tile_statistics(
    logits_NS: torch.Tensor, first: int, end: int, contract: LogprobContract
) -> tuple[torch.Tensor, torch.Tensor]:
    """(largest logit, sum of exp((z - largest) / temperature)) of each tile of a part, float32 [N, T] each."""
    rows, width = logits_NS.shape[0], end - first
    tiles = len(part_tiles(first, end, contract))
    top_NT = torch.empty((rows, tiles), dtype=torch.float32, device=logits_NS.device)
    sum_NT = torch.empty_like(top_NT)
    if not rows or not tiles:
        return top_NT, sum_NT
    readable_NS = _aligned(logits_NS)
    tile = contract.schedule.vocab_tile
    columns = triton.next_power_of_2(tile)
    together = max(1, _STEP_ELEMENTS * _FOLD // columns)
    steps = 1 if interpreted() else _STEPS
    launcher(_tile_kernel, (triton.cdiv(rows * tiles, together * steps),))(
        readable_NS,
        top_NT,
        sum_NT,
        readable_NS.stride(0),
        width,
        readable_NS.shape[1],
        tiles,
        rows * tiles,
        scale(contract),
        TILE=tile,
        COLUMNS=columns,
        LINES=together,
        STEPS=steps,
        CUT=columns != tile or readable_NS.shape[1] != width,
        ROUND=_rounds(logits_NS.dtype, contract),
        LOGITS=TRITON_DTYPES[torch_dtype(contract.logits)],
        num_warps=min(16, max(1, columns // _STEP_ELEMENTS)),
        enable_fp_fusion=False,
    )
    return top_NT, sum_NT


def merged(
    top_NT: torch.Tensor,
    sum_NT: torch.Tensor,
    chosen: torch.Tensor,
    tokens_N: torch.Tensor | None,
    contract: LogprobContract,
    vocabulary: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(score, largest logit, sum of exponentials) of each row from the tiles of a whole vocabulary, float32 [N].

    chosen: the chosen logits [N], or, when tokens are given, the logits [N, V] to pick them from.
    """
    rows, tiles = top_NT.shape
    score_N, top_N, total_N = (torch.empty(rows, dtype=torch.float32, device=top_NT.device) for _ in range(3))
    columns = triton.next_power_of_2(tiles)
    together = max(1, _MERGE_ELEMENTS * _FOLD // columns)
    if rows:
        launcher(_merge_kernel, (triton.cdiv(rows, together),))(
            top_NT,
            sum_NT,
            chosen,
            chosen.stride(0),
            chosen if tokens_N is None else tokens_N,
            top_N,
            total_N,
            score_N,
            rows,
            tiles,
            vocabulary,
            ignore_index(contract),
            float(contract.temperature),
            scale(contract),
            ROWS=together,
            COLUMNS=columns,
            REVERSE=contract.schedule.vocab_order == "reverse",
            PICK=tokens_N is not None,
            LOGITS=TRITON_DTYPES[torch_dtype(contract.logits)],
            num_warps=min(16, max(1, columns // _MERGE_ELEMENTS)),
            enable_fp_fusion=False,
        )
    return score_N, top_N, total_N


def columns_backward(
    grad_N: torch.Tensor,
    logits_NS: torch.Tensor,
    first: int,
    vocabulary: int,
    tokens_N: torch.Tensor,
    normal: tuple[torch.Tensor, torch.Tensor],
    contract: LogprobContract,
) -> torch.Tensor:
    """The gradient of the columns `first`.. of the logits, given the normaliser of the whole vocabulary."""
    rows, columns = logits_NS.shape
    width = part_end(first, columns, vocabulary, contract) - first
    out_NS = torch.empty_like(logits_NS, memory_format=torch.contiguous_format)
    if logits_NS.numel():
        readable_NS = logits_NS if logits_NS.stride(1) == 1 else logits_NS.contiguous()
        block = min(_GRADIENT_ELEMENTS, triton.next_power_of_2(columns))
        together = _GRADIENT_ELEMENTS * _FOLD // block
        launcher(_gradient_kernel, (triton.cdiv(rows, together), triton.cdiv(columns, block)))(
            readable_NS,
            tokens_N.contiguous(),
            grad_N.contiguous(),
            normal[0].contiguous(),
            normal[1].contiguous(),
            out_NS,
            rows,
            readable_NS.stride(0),
            width,
            columns,
            first,
            ignore_index(contract),
            float(contract.temperature),
            scale(contract),
            ROWS=together,
            COLUMNS=block,
            LOGITS=TRITON_DTYPES[torch_dtype(contract.logits)],
            OUTPUT=TRITON_DTYPES[logits_NS.dtype],
            num_warps=8,
            enable_fp_fusion=False,
        )
    return out_NS


def scale(contract: LogprobContract) -> float:
    """What a difference of logits is multiplied by to become an exponent of 2."""
    return 1.0 / (math.log(2.0) * contract.temperature)


def ignore_index(contract: LogprobContract) -> int:
    """The id to ignore; 0, which a kernel never ignores, when there is none."""
    return 0 if contract.ignore_index is None else contract.ignore_index


def _scored(
    logits_NV: torch.Tensor, tokens_N: torch.Tensor, contract: LogprobContract, vocabulary: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    if logits_NV.dim() != 2 or not logits_NV.shape[1]:
        raise OperandError(f"selected_logprob: logits are {tuple(logits_NV.shape)}; pass [rows, vocabulary]")
    end = part_end(0, logits_NV.shape[1], vocabulary, contract)
    if end != vocabulary:
        raise OperandError(f"selected_logprob: {end} columns of logits for a vocabulary of {vocabulary}")
    check_token_shape(tokens_N, logits_NV.shape[0])
    if tokens_N.device.type == "cpu":
        check_tokens(tokens_N, logits_NV.shape[0], vocabulary, contract)
    top_NT, sum_NT = tile_statistics(logits_NV, 0, end, contract)
    readable_NV = logits_NV if logits_NV.stride(1) == 1 else logits_NV.contiguous()
    return merged(top_NT, sum_NT, readable_NV, tokens_N.contiguous(), contract, vocabulary)


def _rounds(dtype: torch.dtype, contract: LogprobContract) -> bool:
    """Whether the contract's rounding changes logits of this dtype."""
    return torch_dtype(contract.logits) not in (dtype, torch.float32)


def _aligned(logits_NS: torch.Tensor) -> torch.Tensor:
    """The logits where they are, or copied so that rows start and end on 16 elements and 16 bytes."""
    rows, columns = logits_NS.shape
    fits = logits_NS.stride(1) == 1 and logits_NS.stride(0) % _ALIGNED == 0 and columns % _ALIGNED == 0
    if fits and logits_NS.data_ptr() % 16 == 0:
        return logits_NS
    padded = triton.cdiv(columns, _ALIGNED) * _ALIGNED
    copy_NS = torch.empty((rows, padded), dtype=logits_NS.dtype, device=logits_NS.device)
    copy_NS[:, :columns] = logits_NS
    copy_NS[:, columns:] = float("-inf")
    return copy_NS
