"""rope, Triton: one pass; a program turns a fixed number of heads, whichever tokens they belong to.

Nothing is summed across elements, so a tile's shape can change no bit; it is chosen by head_dim alone. `half` loads the
two halves of a head, `interleaved` loads whole heads in one run and splits pairs in registers. FMA contraction is off:
the contract rounds each product.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from rlk_ledger_kernels.dtypes import torch_dtype
from rlk_ledger_kernels.ops.rope.contract import RopeContract
from rlk_ledger_kernels.ops.rope.table import RopeTable, check_operands
from rlk_ledger_kernels.triton_language import TRITON_DTYPES, launcher, round_to, rounded_through, row_tile, warps


@triton.jit
def _turn(first, second, cos, sin, ARITHMETIC: tl.constexpr):
    a = rounded_through(first, ARITHMETIC)
    b = rounded_through(second, ARITHMETIC)
    cos = rounded_through(cos, ARITHMETIC)
    sin = rounded_through(sin, ARITHMETIC)
    turned_a = rounded_through(a * cos, ARITHMETIC) - rounded_through(b * sin, ARITHMETIC)
    turned_b = rounded_through(b * cos, ARITHMETIC) + rounded_through(a * sin, ARITHMETIC)
    return rounded_through(turned_a, ARITHMETIC), rounded_through(turned_b, ARITHMETIC)


@triton.jit(do_not_specialize=["heads_total"])
def _rope_kernel(
    x_ptr,
    cos_ptr,
    sin_ptr,
    out_ptr,
    heads_total,
    heads,
    token_stride,
    head_stride,
    HEAD_DIM: tl.constexpr,
    TURNED: tl.constexpr,
    ROWS: tl.constexpr,
    PAIRS: tl.constexpr,
    REST: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    INVERSE: tl.constexpr,
    ARITHMETIC: tl.constexpr,
    OUTPUT: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    token = row // heads
    here = (row < heads_total)[:, None]
    source = (token * token_stride + (row % heads) * head_stride)[:, None]
    target = (row * HEAD_DIM)[:, None]
    pair = tl.arange(0, PAIRS)
    inside = here & (pair < TURNED // 2)[None, :]
    # The entry of a pair's second element holds the sine with its own sign.
    entry = pair * 2 + 1 if INTERLEAVED else pair + TURNED // 2
    table_at = (token * TURNED)[:, None] + entry[None, :]
    cos = tl.load(cos_ptr + table_at, mask=inside, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + table_at, mask=inside, other=0.0).to(tl.float32)
    if INVERSE:
        sin = -sin
    if INTERLEAVED:
        element = tl.arange(0, 2 * PAIRS)
        both_inside = here & (element < TURNED)[None, :]
        both = tl.load(x_ptr + source + element[None, :], mask=both_inside, other=0.0).to(tl.float32)
        first, second = tl.split(tl.reshape(both, (ROWS, PAIRS, 2)))
        first, second = _turn(first, second, cos, sin, ARITHMETIC)
        turned = tl.reshape(tl.join(first, second), (ROWS, 2 * PAIRS))
        tl.store(out_ptr + target + element[None, :], round_to(turned, OUTPUT), mask=both_inside)
    else:
        low = source + pair[None, :]
        first = tl.load(x_ptr + low, mask=inside, other=0.0).to(tl.float32)
        second = tl.load(x_ptr + low + TURNED // 2, mask=inside, other=0.0).to(tl.float32)
        first, second = _turn(first, second, cos, sin, ARITHMETIC)
        tl.store(out_ptr + target + pair[None, :], round_to(first, OUTPUT), mask=inside)
        tl.store(out_ptr + target + pair[None, :] + TURNED // 2, round_to(second, OUTPUT), mask=inside)
    if TURNED < HEAD_DIM:
        element = TURNED + tl.arange(0, REST)[None, :]
        rest_inside = here & (element < HEAD_DIM)
        rest = tl.load(x_ptr + source + element, mask=rest_inside, other=0.0).to(tl.float32)
        tl.store(out_ptr + target + element, round_to(rounded_through(rest, ARITHMETIC), OUTPUT), mask=rest_inside)


def rope(x_NHD: torch.Tensor, rows: RopeTable, contract: RopeContract) -> torch.Tensor:
    """Rotate every head: x * cos + partner(x) * sin, each of the three operations rounded.

    x_NHD: [N, heads, D], read in place when its last dimension is contiguous. rows: the table at the N positions.
    Returns [N, heads, D] in the contract's output dtype. Raises OperandError when the table's rows are not [N, R].
    """
    return _rotate(x_NHD, rows, contract, torch_dtype(contract.output_dtype), inverse=False)


def rope_backward(grad_NHD: torch.Tensor, rows: RopeTable, contract: RopeContract) -> torch.Tensor:
    """Gradient: the rotation by the opposite angle, in the contract's arithmetic.

    grad_NHD: [N, heads, D]. Returns [N, heads, D] in `grad_NHD`'s dtype.
    """
    return _rotate(grad_NHD, rows, contract, grad_NHD.dtype, inverse=True)


def _rotate(
    x_NHD: torch.Tensor, rows: RopeTable, contract: RopeContract, output: torch.dtype, inverse: bool
) -> torch.Tensor:
    turned = check_operands(x_NHD, rows, contract)
    x_NHD = x_NHD if x_NHD.stride(-1) == 1 else x_NHD.contiguous()
    tokens, heads, head_dim = x_NHD.shape
    out = torch.empty(x_NHD.shape, dtype=output, device=x_NHD.device)
    tile_rows, columns = row_tile(max(turned, head_dim - turned))
    if out.numel():
        launcher(_rope_kernel, (triton.cdiv(tokens * heads, tile_rows),))(
            x_NHD,
            rows.cos_PD.contiguous(),
            rows.sin_PD.contiguous(),
            out,
            tokens * heads,
            heads,
            x_NHD.stride(0),
            x_NHD.stride(1),
            HEAD_DIM=head_dim,
            TURNED=turned,
            ROWS=tile_rows,
            PAIRS=max(1, triton.next_power_of_2(turned) // 2),
            REST=triton.next_power_of_2(max(1, head_dim - turned)),
            INTERLEAVED=contract.style == "interleaved",
            INVERSE=inverse,
            ARITHMETIC=TRITON_DTYPES[torch_dtype(contract.arithmetic)],
            OUTPUT=TRITON_DTYPES[output],
            num_warps=warps(tile_rows, columns),
            enable_fp_fusion=False,
        )
    return out
