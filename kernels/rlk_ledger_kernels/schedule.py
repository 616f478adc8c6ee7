"""The order in which sums are taken: everything that may change rounding and nothing that may change meaning.

Two schedules give the same mathematics in another order. Replay measures a noise floor by scoring under
several of them (*placebo schedules*), so nothing but order may ever be read from this struct.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rlk_ledger_kernels.errors import ContractError

ALIGNMENT = 16
"""Row tiles are multiples of this many float32, so that every tile starts on a 64-byte boundary."""

MAX_CPU_LEAF = 256
"""Above this, BLAS cuts K itself on a CPU, at places that depend on the thread count; products there refuse it."""

MAX_LEAF = 4096
"""Longest leaf of any device: a GPU keeps one accumulator per level of the tree, so it wants few, long leaves."""

KOrder = Literal["ascending", "descending"]
TileOrder = Literal["forward", "reverse"]


@dataclass(frozen=True)
class Schedule:
    """One order of summation.

    k_leaf: longest run of a contraction summed in one piece (1..4096; on a CPU products refuse leaves above 256);
        longer ones are halved until they fit and the halves are added as a tree, so shards of K/2, K/4, K/8 merge to
        the same bits. On a GPU choose 512 or 1024, at most 2 K / ranks - 1 under tensor parallelism.
    kv_block: keys per logical attention block (a power of two, 16..256), whatever the paging.
    vocab_tile: logits per tile of the log-sum-exp (at least 1).
    k_order: direction of the sum inside a contraction.
    kv_order, vocab_order: order in which blocks and tiles are merged.
    row_tiles: the row counts a matrix product is run at, each a multiple of 16, ascending. These are the one
        field that must not change a bit; the probe checks that on the shapes in use.
    """

    k_leaf: int = 128
    kv_block: int = 64
    vocab_tile: int = 1024
    k_order: KOrder = "ascending"
    kv_order: TileOrder = "forward"
    vocab_order: TileOrder = "forward"
    row_tiles: tuple[int, ...] = (16, 32, 64, 128, 256, 512)

    def __post_init__(self) -> None:
        """Refuse what no backend could keep."""
        if not 1 <= self.k_leaf <= MAX_LEAF:
            raise ContractError(f"schedule.k_leaf is {self.k_leaf}; choose 1..{MAX_LEAF}")
        if self.kv_block not in (16, 32, 64, 128, 256):
            raise ContractError(f"schedule.kv_block is {self.kv_block}; choose 16, 32, 64, 128 or 256")
        if self.vocab_tile < 1:
            raise ContractError(f"schedule.vocab_tile is {self.vocab_tile}; choose at least 1")
        if self.k_order not in ("ascending", "descending"):
            raise ContractError(f"schedule.k_order is {self.k_order!r}; choose 'ascending' or 'descending'")
        for name in ("kv_order", "vocab_order"):
            if getattr(self, name) not in ("forward", "reverse"):
                raise ContractError(f"schedule.{name} is {getattr(self, name)!r}; choose 'forward' or 'reverse'")
        rising = list(self.row_tiles) == sorted(set(self.row_tiles))
        if not self.row_tiles or not rising or any(tile < 1 or tile % ALIGNMENT for tile in self.row_tiles):
            raise ContractError(f"schedule.row_tiles is {self.row_tiles}; choose rising multiples of {ALIGNMENT}")

    @property
    def reversed_k(self) -> bool:
        """Whether contractions are summed from the last element to the first."""
        return self.k_order == "descending"


_PLACEBOS = (
    Schedule(k_leaf=32, kv_block=32, vocab_tile=64, k_order="descending", kv_order="reverse"),
    Schedule(k_leaf=64, kv_block=16, vocab_tile=96, vocab_order="reverse"),
    Schedule(k_leaf=16, kv_block=128, vocab_tile=512, kv_order="reverse"),
    Schedule(k_leaf=128, kv_block=32, vocab_tile=128, k_order="descending"),
    Schedule(k_leaf=64, kv_block=128, vocab_tile=256, k_order="descending", vocab_order="reverse"),
    Schedule(k_leaf=32, kv_block=64, vocab_tile=192, kv_order="reverse", vocab_order="reverse"),
    Schedule(k_leaf=16, kv_block=16, vocab_tile=48, k_order="descending"),
    Schedule(k_leaf=8, kv_block=32, vocab_tile=80, kv_order="reverse"),
    Schedule(k_leaf=24, kv_block=128, vocab_tile=176, k_order="descending", kv_order="reverse"),
    Schedule(k_leaf=96, kv_block=16, vocab_tile=320, k_order="descending", kv_order="reverse"),
)


def placebo_schedules(count: int = 4) -> tuple[Schedule, ...]:
    """The first `count` of a fixed list of schedules that differ from the default in order alone.

    Raises ContractError for a count below 1 or above 10.
    """
    if not 1 <= count <= len(_PLACEBOS):
        raise ContractError(f"placebo_schedules({count}): ask for 1..{len(_PLACEBOS)} schedules")
    return _PLACEBOS[:count]
