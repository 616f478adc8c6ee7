"""Whether this machine keeps the promise on the shapes in use: measured at first use, never assumed.

The probe runs the very products an operator will run (same leaf, same row counts, same strides) on random
operands and compares bits: one row count with another (T5: a prefill tile with a decode tile), shifted rows
beside other neighbours (T1, T2), and the current thread count with one thread. `exp` and `log` are compared at
shifted offsets. What fails is given up in this order: several threads, several row counts, the run.

On a GPU the same products run there, through the torch backend and so through cuBLAS; threads do not apply, and one row
count means the widest of at most 128 rows, since a GPU pads cheaply.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from rlk_ledger_kernels.bits import same_bits
from rlk_ledger_kernels.errors import InvarianceError
from rlk_ledger_kernels.ops.attention.plan import DECODE_TILE, PREFILL_TILE
from rlk_ledger_kernels.ops.linear.torch import contract_rows
from rlk_ledger_kernels.precision import cublas_workspace, exact_products
from rlk_ledger_kernels.schedule import ALIGNMENT, Schedule

_SEED = 20260731
_CPU = torch.device("cpu")
_WIDEST_SINGLE_TILE = 128


@dataclass(frozen=True)
class ShapesInUse:
    """What one model runs.

    products: (K of the whole operand, first and end element of the leaf, outputs) of every linear leaf.
    heads: (query heads per kv head, head_dim, columns of the value cache), or None without attention.
    """

    products: frozenset[tuple[int, int, int, int]]
    heads: tuple[int, int, int] | None = None


@dataclass(frozen=True)
class Admission:
    """What the probe allows.

    threads: how many threads may run. row_tiles: row counts of linear. q_tiles: (decode, prefill) rows of an
    attention tile. reason: one sentence for the record.
    """

    threads: int
    row_tiles: tuple[int, ...]
    q_tiles: tuple[int, int]
    reason: str


Draw = Callable[..., torch.Tensor]
"""A fresh random tensor of a shape, on the device that is probed."""

_verdicts: dict[tuple[object, ...], Admission] = {}


@contextmanager
def using_threads(threads: int) -> Iterator[None]:
    """Run the body on `threads` intra-op threads and restore the count afterwards."""
    before = torch.get_num_threads()
    if before == threads:
        yield
        return
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def admit(shapes: ShapesInUse, schedule: Schedule, device: torch.device | str = "cpu") -> Admission:
    """Probe these shapes on the current thread count, or on a GPU, once per process and machine.

    Raises InvarianceError when even one thread and one row count do not give repeatable bits.
    """
    threads, place = torch.get_num_threads(), torch.device(device)
    key = (*_machine(place), torch.__version__, shapes, schedule)
    if key not in _verdicts:
        _verdicts[key] = _decide(shapes, schedule, threads, place)
    return _verdicts[key]


def _machine(device: torch.device) -> tuple[object, ...]:
    """What a verdict holds for besides build, shapes and schedule."""
    if device.type == "cuda":
        name, capability = torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)
        return ("cuda", name, capability, torch.version.cuda, cublas_workspace())
    return (device.type, torch.get_num_threads(), torch.backends.cpu.get_cpu_capability())


def _candidates(
    schedule: Schedule, threads: int, device: torch.device
) -> list[tuple[int, tuple[int, ...], tuple[int, int]]]:
    """(threads, row tiles, query tiles) from the fastest to the safest."""
    decode, prefill = min(DECODE_TILE, schedule.kv_block), min(PREFILL_TILE, schedule.kv_block)
    full, single = (schedule.row_tiles, (decode, prefill)), (schedule.row_tiles[:1], (prefill, prefill))
    if device.type != "cpu":
        narrow = [tile for tile in schedule.row_tiles if tile <= _WIDEST_SINGLE_TILE]
        return [(threads, *full), (threads, tuple(narrow[-1:]) or schedule.row_tiles[:1], single[1])]
    return list(dict.fromkeys([(threads, *full), (1, *full), (threads, *single), (1, *single)]))


def _decide(shapes: ShapesInUse, schedule: Schedule, threads: int, device: torch.device) -> Admission:
    failures: list[str] = []
    where = "thread(s)" if device.type == "cpu" else f"thread(s) for {device.type} ({cublas_workspace()})"
    for count, row_tiles, q_tiles in _candidates(schedule, threads, device):
        failure = first_failure(shapes, schedule, count, row_tiles, q_tiles, device)
        if failure is None:
            because = f" because {failures[0]}" if failures else ""
            reason = f"probed on {count} {where}, row tiles {row_tiles}, query tiles {q_tiles}{because}"
            return Admission(threads=count, row_tiles=row_tiles, q_tiles=q_tiles, reason=reason)
        failures.append(failure)
    raise InvarianceError(
        f"this build of torch gives no repeatable bits here: {failures[-1]}; "
        "score on another machine or build, or choose a smaller schedule.k_leaf"
    )


def first_failure(
    shapes: ShapesInUse,
    schedule: Schedule,
    threads: int,
    row_tiles: tuple[int, ...],
    q_tiles: tuple[int, int],
    device: torch.device = _CPU,
) -> str | None:
    """The first thing that depends on what it must not depend on, in words; None when all is well."""
    generator = torch.Generator().manual_seed(_SEED)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float32).to(device)

    if not _pointwise_holds(threads, draw):
        return f"exp or log depends on the place of an element on {threads} thread(s)"
    for product in sorted(shapes.products):
        if not _product_holds(product, threads, row_tiles, draw):
            return (
                f"the product (K, leaf start, leaf end, outputs) = {product} is not repeatable on {threads} thread(s)"
            )
    if shapes.heads is not None and not _attention_holds(shapes.heads, schedule, threads, q_tiles, draw):
        return f"the batched product of attention {shapes.heads} is not repeatable on {threads} thread(s)"
    return None


def _pointwise_holds(threads: int, draw: Draw) -> bool:
    x_N = draw(70_003) * 8
    for function in (torch.exp, lambda t: torch.log(t.abs() + 1e-6)):
        with using_threads(1):
            whole_N = function(x_N)
        with using_threads(threads):
            for offset in (*range(18), 33, 70_000):
                for length in (1, 15, 31, 4097, 65_539):
                    if not same_bits(function(x_N[offset : offset + length]), whole_N[offset : offset + length]):
                        return False
    return True


def _product_holds(product: tuple[int, int, int, int], threads: int, row_tiles: tuple[int, ...], draw: Draw) -> bool:
    k, start, end, outputs = product
    rows = row_tiles[-1] + row_tiles[0]
    stride = -(-k // ALIGNMENT) * ALIGNMENT
    x_NK = draw(rows, stride)[:, :k]
    leaves = ((start, end, draw(end - start, outputs)),)
    shifted_NK = draw(rows, stride)[:, :k]
    shifted_NK[: rows - 5] = x_NK[5:]
    with using_threads(1):
        expected_NO = contract_rows(x_NK, leaves, row_tiles[:1])
    with using_threads(threads):
        for tile in row_tiles:
            usable = rows // tile * tile
            if not same_bits(contract_rows(x_NK[:usable], leaves, (tile,)), expected_NO[:usable]):
                return False
            moved_NO = contract_rows(shifted_NK[:usable], leaves, (tile,))
            if not same_bits(moved_NO[: usable - 5], expected_NO[5:usable]):
                return False
    return True


def _attention_holds(
    heads: tuple[int, int, int],
    schedule: Schedule,
    threads: int,
    q_tiles: tuple[int, int],
    draw: Draw,
) -> bool:
    group, head_dim, columns = heads
    small, large = group * q_tiles[0], group * q_tiles[1]
    q_BMD = draw(40, large, head_dim)
    k_BDS = draw(40, schedule.kv_block, head_dim).transpose(1, 2)
    v_BSV = draw(40, schedule.kv_block, columns)
    with exact_products(q_BMD.device), using_threads(1):
        scores = torch.bmm(q_BMD[:, :small], k_BDS)
        values = torch.bmm(scores, v_BSV)
    with exact_products(q_BMD.device), using_threads(threads):
        for batch in (1, 2, 3, 40):
            for rows in (small, large):
                got = torch.bmm(q_BMD[:batch, :rows].contiguous(), k_BDS[:batch])
                if not same_bits(got[:, :small], scores[:batch]):
                    return False
                if not same_bits(torch.bmm(got, v_BSV[:batch])[:, :small], values[:batch]):
                    return False
    return True
