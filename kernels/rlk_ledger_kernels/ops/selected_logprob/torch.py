"""selected_logprob, torch: (max, sum of exponentials) per vocabulary tile, merged in tile order.

The chosen token's logit is copied from the one tile that holds it and never takes part in a sum, so a vocabulary
cut over ranks at tile boundaries gives the same bits.

Legend: N rows, V vocabulary, W columns of one tile, T tiles.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from rlk_ledger_kernels.dtypes import torch_dtype
from rlk_ledger_kernels.errors import OperandError
from rlk_ledger_kernels.ops.linear.torch import row_sum
from rlk_ledger_kernels.ops.selected_logprob.contract import LogprobContract
from rlk_ledger_kernels.ops.selected_logprob.statistics import (
    Statistics,
    check_tokens,
    part_end,
    part_tiles,
    whole,
)

Tile = tuple[int, torch.Tensor]
"""(id of the first token, logits [N, W])."""


def selected_logprob(
    logits_NV: torch.Tensor, tokens_N: torch.Tensor, contract: LogprobContract, vocabulary: int | None = None
) -> torch.Tensor:
    """Score one token per row from logits that already exist: log softmax(z / temperature)[token].

    logits_NV: [N, V], rounded to `contract.logits` first. tokens_N: int64 [N]. vocabulary: the declared size, when
    columns beyond it are padding. Returns float32 [N] (nats), +0 for ignored rows; a row that holds NaN, +inf or
    nothing but -inf scores NaN. Raises OperandError naming the first token outside the vocabulary.
    """
    size = logits_NV.shape[-1] if vocabulary is None else vocabulary
    return merge_statistics((columns_statistics(logits_NV, 0, size, tokens_N, contract),), contract)


def selected_logprob_backward(
    grad_N: torch.Tensor,
    logits_NV: torch.Tensor,
    tokens_N: torch.Tensor,
    contract: LogprobContract,
    vocabulary: int | None = None,
) -> torch.Tensor:
    """The gradient of the logits: grad / temperature * (onehot(token) - softmax(z / temperature)).

    Returns [N, V] in the logits' dtype; ignored rows and padding columns are exactly 0. The rounding to
    `contract.logits` passes gradients through.
    """
    size = logits_NV.shape[-1] if vocabulary is None else vocabulary
    top_N, total_N = normaliser((columns_statistics(logits_NV, 0, size, tokens_N, contract),), contract)
    return columns_backward(grad_N, logits_NV, 0, size, tokens_N, (top_N, total_N), contract)


def columns_statistics(
    logits_NS: torch.Tensor, first: int, vocabulary: int, tokens_N: torch.Tensor, contract: LogprobContract
) -> Statistics:
    """Statistics of the columns `first`.. of the logits of a vocabulary, padding beyond it left out."""
    if logits_NS.dim() != 2:
        raise OperandError(f"selected_logprob: logits are {tuple(logits_NS.shape)}; pass [rows, vocabulary]")
    end = part_end(first, logits_NS.shape[1], vocabulary, contract)
    dtype = torch_dtype(contract.logits)
    tiles = ((a, logits_NS[:, a - first : b - first].to(dtype)) for a, b in part_tiles(first, end, contract))
    return tile_statistics(tiles, first, end, vocabulary, tokens_N, contract)


def tile_statistics(
    tiles: Iterable[Tile], first: int, end: int, vocabulary: int, tokens_N: torch.Tensor, contract: LogprobContract
) -> Statistics:
    """Reduce the tiles of a part, given in ascending order, one at a time."""
    rows, device = tokens_N.shape[0], tokens_N.device
    ignored_N = check_tokens(tokens_N, rows, vocabulary, contract)
    count = len(part_tiles(first, end, contract))
    top_NT = torch.empty((rows, count), dtype=torch.float32, device=device)
    sum_NT = torch.empty((rows, count), dtype=torch.float32, device=device)
    chosen_N = torch.zeros(rows, dtype=torch.float32, device=device)
    owned_N = (tokens_N >= first) & (tokens_N < end)
    for index, (start, logits_NW) in enumerate(tiles):
        wide_NW = logits_NW.to(torch.float32)
        if wide_NW.shape[0] != rows:
            raise OperandError(f"selected_logprob: {wide_NW.shape[0]} rows of logits and {rows} tokens")
        local_N = tokens_N.to(torch.int64) - start
        inside_N = (local_N >= 0) & (local_N < wide_NW.shape[1])
        found_N = wide_NW.gather(1, local_N.clamp(0, wide_NW.shape[1] - 1)[:, None])[:, 0]
        chosen_N = torch.where(inside_N, found_N, chosen_N)
        top_N = wide_NW.amax(-1)
        top_NT[:, index] = top_N
        shifted_NW = _over(wide_NW - anchor(top_N)[:, None], contract)
        sum_NT[:, index] = row_sum(shifted_NW.exp_(), contract.schedule)
    return Statistics(first, end, vocabulary, top_NT, sum_NT, chosen_N, owned_N, ignored_N)


def normaliser(parts: Sequence[Statistics], contract: LogprobContract) -> tuple[torch.Tensor, torch.Tensor]:
    """(largest logit, sum of exp((z - largest) / temperature)) of each row over a whole vocabulary, float32 [N].

    Tile sums are added in tile order, whatever part they come from. Raises OperandError as `merge_statistics` does.
    """
    ordered = whole(parts)
    top_NT = torch.cat([part.top_NT for part in ordered], dim=1)
    sum_NT = torch.cat([part.sum_NT for part in ordered], dim=1)
    top_N = top_NT.amax(-1)
    scaled_TN = (sum_NT * _over(top_NT - anchor(top_N)[:, None], contract).exp()).T.contiguous()
    total_N = torch.zeros_like(top_N)
    order = range(scaled_TN.shape[0])
    for index in reversed(order) if contract.schedule.vocab_order == "reverse" else order:
        total_N = total_N + scaled_TN[index]
    return top_N, total_N


def merge_statistics(parts: Sequence[Statistics], contract: LogprobContract) -> torch.Tensor:
    """(chosen - max) / temperature - log(sum), from the parts of one vocabulary in any order; float32 [N].

    Raises OperandError when the parts leave a gap, overlap or disagree about the vocabulary.
    """
    top_N, total_N = normaliser(parts, contract)
    chosen_N = torch.full_like(top_N, float("nan"))
    for part in parts:
        chosen_N = torch.where(part.owned_N, part.chosen_N, chosen_N)
    logprob_N = _over(chosen_N - top_N, contract) - total_N.log()
    return torch.where(parts[0].ignored_N, 0.0, logprob_N)


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
    end = part_end(first, logits_NS.shape[1], vocabulary, contract)
    out_NS = torch.zeros_like(logits_NS, memory_format=torch.contiguous_format)
    dtype = torch_dtype(contract.logits)
    for a, b in part_tiles(first, end, contract):
        tile = (a, logits_NS[:, a - first : b - first].to(dtype))
        out_NS[:, a - first : b - first] = tile_backward(grad_N, tile, tokens_N, normal, contract)
    return out_NS


def tile_backward(
    grad_N: torch.Tensor,
    tile: Tile,
    tokens_N: torch.Tensor,
    normal: tuple[torch.Tensor, torch.Tensor],
    contract: LogprobContract,
) -> torch.Tensor:
    """grad / temperature * (onehot(token) - softmax) of one tile, float32 [N, W]; ignored rows are exactly 0."""
    start, logits_NW = tile
    top_N, total_N = normal
    share_NW = _over(logits_NW.to(torch.float32) - anchor(top_N)[:, None], contract).exp() / total_N[:, None]
    local_N = tokens_N.to(torch.int64) - start
    column_W = torch.arange(logits_NW.shape[1], device=logits_NW.device)
    out_NW = torch.where(column_W == local_N[:, None], 1.0 - share_NW, -share_NW)
    out_NW = out_NW * _over(grad_N.to(torch.float32), contract)[:, None]
    if contract.ignore_index is None:
        return out_NW
    return torch.where((tokens_N == contract.ignore_index)[:, None], 0.0, out_NW)


def anchor(top_N: torch.Tensor) -> torch.Tensor:
    """The maximum to subtract: 0 for a row whose logits so far are all minus infinity (masked by the caller)."""
    return torch.where(top_N == float("-inf"), 0.0, top_N)


def _over(x: torch.Tensor, contract: LogprobContract) -> torch.Tensor:
    """x / temperature: differences are taken before they are divided, which rounds once less."""
    return x if contract.temperature == 1.0 else x / contract.temperature
