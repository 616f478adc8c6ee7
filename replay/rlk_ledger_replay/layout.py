"""How the ranks of a job share one decoder, and what a model must offer for that to change no bit.

Tensor parallel: heads, intermediate columns and vocabulary tiles are cut over ranks; what ranks add meets along the
tree a single rank would use. Sequence parallel: the tensor-parallel ranks also share the rows of norms and residuals.
Context parallel: ranks share whole KV blocks of each sequence, with the positions in them.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from rlk_ledger_kernels.dtypes import one_of
from rlk_ledger_kernels.errors import ContractError
from rlk_ledger_kernels.ops.attention.partials import contiguous, zigzag
from rlk_ledger_kernels.ops.linear.tree import shard_span
from rlk_ledger_replay.checkpoint import ModelConfig
from rlk_ledger_replay.numerics import Numerics


@dataclass(frozen=True)
class Layout:
    """Ranks along each axis; tp x cp ranks in all.

    sp: share rows of norms and residuals among the tp ranks. cp_order: which blocks a context-parallel rank owns:
    `contiguous` one run, `zigzag` one early and one late run, which balances causal work.
    """

    tp: int = 1
    cp: int = 1
    sp: bool = False
    cp_order: Literal["contiguous", "zigzag"] = "contiguous"

    def __post_init__(self) -> None:
        """Refuse what no job could be; raises ContractError."""
        for name in ("tp", "cp"):
            size = getattr(self, name)
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise ContractError(f"layout.{name} is {size!r}; choose a whole number of at least 1")
        if self.sp and self.tp == 1:
            raise ContractError("layout.sp shares rows among the tp ranks; choose tp above 1")
        one_of("layout.cp_order", self.cp_order, ("contiguous", "zigzag"))

    def owned_blocks(self, blocks: int) -> tuple[tuple[int, ...], ...]:
        """For each cp rank, the logical KV blocks it owns of a sequence of `blocks`."""
        return (contiguous if self.cp_order == "contiguous" else zigzag)(blocks, self.cp)


@dataclass(frozen=True)
class HeadSpan:
    """Query heads q_first..q_end-1 of one rank and the key-value heads they read."""

    q_first: int
    q_end: int
    kv_first: int
    kv_end: int


def head_span(config: ModelConfig, ranks: int, rank: int) -> HeadSpan:
    """The heads of one tensor-parallel rank; with more ranks than key-value heads, several ranks hold the same one."""
    wide = config.heads // ranks
    if config.kv_heads >= ranks:
        narrow = config.kv_heads // ranks
        return HeadSpan(rank * wide, (rank + 1) * wide, rank * narrow, (rank + 1) * narrow)
    held = rank * config.kv_heads // ranks
    return HeadSpan(rank * wide, (rank + 1) * wide, held, held + 1)


def vocabulary_spans(vocabulary: int, tile: int, ranks: int) -> tuple[tuple[int, int], ...]:
    """[first, end) of the token ids of each rank, cut at vocabulary tiles; shares differ by at most one tile."""
    tiles = -(-vocabulary // tile)
    edges = [min(tiles * rank // ranks * tile, vocabulary) for rank in range(ranks + 1)]
    return tuple(itertools.pairwise(edges))


def check_layout(layout: Layout, config: ModelConfig, numerics: Numerics) -> None:
    """Refuse a layout under which this model would not keep its bits; raises ContractError naming the requirement."""
    tp = layout.tp
    departs = numerics.attention_merge or numerics.lse_state or numerics.reduce_ranks > 1
    if departs and (tp, layout.cp) != (1, 1):
        raise ContractError("numerics that imitate merging in a narrow dtype run on one rank; choose tp 1 and cp 1")
    if tp == 1:
        return
    if config.heads % tp:
        raise ContractError(f"layout.tp is {tp}: {config.heads} query heads do not divide among {tp} ranks")
    if config.kv_heads % tp and tp % config.kv_heads:
        raise ContractError(
            f"layout.tp is {tp}: {config.kv_heads} key-value heads neither divide among the ranks nor into them"
        )
    tiles = -(-config.vocabulary // numerics.schedule.vocab_tile)
    if tiles < tp:
        raise ContractError(
            f"layout.tp is {tp}: a vocabulary of {config.vocabulary} has {tiles} tile(s); choose a vocab_tile of "
            f"at most {config.vocabulary // tp}"
        )
    widths = {"o_proj": config.heads * config.head_dim, "down_proj": config.intermediate}
    if config.experts is not None:
        widths["down_proj of an expert"] = config.experts.intermediate
    for name, width in widths.items():
        try:
            shard_span(width, numerics.leaves().linear, tp, 0)
        except ContractError as error:
            raise ContractError(f"layout.tp is {tp}, {name}: {error}") from None


def even_pieces(rows: int, ranks: int) -> tuple[tuple[int, int], ...]:
    """[first, end) of each rank's rows; lengths differ by at most one."""
    edges: Sequence[int] = [rows * rank // ranks for rank in range(ranks + 1)]
    return tuple(itertools.pairwise(edges))
