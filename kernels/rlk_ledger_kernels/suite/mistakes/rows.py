"""Wrong operators over rows: their bits, forward or backward, depend on something beside the row."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import ModuleType

import torch

from rlk_ledger_kernels.suite.case import MaskedCase, RowCase, Rows, Wrong
from rlk_ledger_kernels.suite.mistakes.plain import draw, log_sum_exp, product, summed

ROWS, K, OUTPUTS, VOCABULARY = 130, 24, 6, 40
Run = Callable[[ModuleType, Rows], torch.Tensor]


def row_mistakes() -> list[Wrong]:
    """Split-K by shape, a tile chosen by batch, a scale shared by the batch, and a gradient averaged over the batch."""
    hidden = (draw(1, ROWS, K),)
    logits = (draw(2, ROWS, VOCABULARY) * 3, torch.arange(ROWS) % VOCABULARY)
    weight_OK = draw(3, OUTPUTS, K)
    right = RowCase("linear", "plain sums", "float32", hidden, partial(_linear, weight_OK), _unused, _linear_gradient)
    return [
        _wrong("few rows split K in two, many rows do not (split-K by shape)", right, partial(_split_k, weight_OK)),
        _wrong(
            "the vocabulary tile is wider where there are few rows (batch-dependent tile)",
            RowCase("selected_logprob", "plain sums", "float32", logits, partial(_logprob, 16), _unused),
            partial(_logprob, None),
        ),
        _wrong(
            "one scale for the whole call, so padding and neighbours leak into every row",
            RowCase("rms_norm", "plain sums", "float32", hidden, partial(_norm, False), _unused),
            partial(_norm, True),
        ),
        Wrong(
            "invariance",
            "the gradient of a row is divided by the rows of the call (a mean where the contract says sum)",
            RowCase("linear", "plain sums", "float32", hidden, right.run, _unused, _averaged_gradient),
            right,
        ),
        _wrong(
            "many rows take a wider tile (batch-dependent tile, from 512 rows on)", right, partial(_many, weight_OK)
        ),
        _wrong("operands are read as if they were contiguous (strides ignored)", right, partial(_dense, weight_OK)),
        _wrong(
            "the largest logit is subtracted in place (an operand is written to)",
            RowCase("selected_logprob", "plain sums", "float32", logits, partial(_logprob, 16), _unused),
            _in_place,
        ),
        _mask_by_arithmetic(),
    ]


def _wrong(mistake: str, right: RowCase, run: Run) -> Wrong:
    case = RowCase(right.operator, right.name, right.dtype, right.rows, run, right.reference)
    return Wrong("invariance", mistake, case, right)


def _unused(rows: Rows) -> torch.Tensor:
    """The invariance suite compares a case with itself and asks no reference."""
    return rows[0]


def _linear(weight_OK: torch.Tensor, _: ModuleType, rows: Rows) -> torch.Tensor:
    return product(rows[0], weight_OK)


def _split_k(weight_OK: torch.Tensor, _: ModuleType, rows: Rows) -> torch.Tensor:
    return product(rows[0], weight_OK, K // 2 if len(rows[0]) < 32 else None)


def _many(weight_OK: torch.Tensor, _: ModuleType, rows: Rows) -> torch.Tensor:
    return product(rows[0], weight_OK, K // 2 if len(rows[0]) >= 512 else None)


def _dense(weight_OK: torch.Tensor, _: ModuleType, rows: Rows) -> torch.Tensor:
    return product(rows[0].as_strided(rows[0].shape, (K, 1)), weight_OK)


def _in_place(module: ModuleType, rows: Rows) -> torch.Tensor:
    rows[0].sub_(rows[0].amax(-1, keepdim=True))
    return _logprob(16, module, rows)


def _logprob(tile: int | None, _: ModuleType, rows: Rows) -> torch.Tensor:
    logits_NV, tokens_N = rows
    width = tile or (VOCABULARY if len(logits_NV) < 32 else 16)
    cuts = [min(start + width, VOCABULARY) for start in range(0, VOCABULARY, width)]
    return logits_NV.gather(1, tokens_N[:, None])[:, 0] - log_sum_exp(logits_NV, cuts)


def _norm(shared: bool, _: ModuleType, rows: Rows) -> torch.Tensor:
    squares_N = summed(rows[0].square()) / K
    if shared:
        squares_N = squares_N.mean().expand_as(squares_N)
    return rows[0] / (squares_N + 1e-6).sqrt()[:, None]


def _linear_gradient(_: ModuleType, rows: Rows) -> torch.Tensor:
    return rows[0] * 2.0


def _averaged_gradient(_: ModuleType, rows: Rows) -> torch.Tensor:
    return rows[0] * 2.0 / len(rows[0])


def _mask_by_arithmetic() -> Wrong:
    values, mask_N = (draw(4, ROWS),), torch.arange(ROWS) % 3 != 1

    def by_index(_: ModuleType, rows: Rows, mask_N: torch.Tensor) -> torch.Tensor:
        return summed(rows[0][mask_N][None])

    def by_arithmetic(_: ModuleType, rows: Rows, mask_N: torch.Tensor) -> torch.Tensor:
        return summed((rows[0] * mask_N)[None])

    def unused(rows: Rows, _: torch.Tensor) -> torch.Tensor:
        return rows[0]

    cases = [
        MaskedCase("masked_mean", "plain sums", "float32", values, mask_N, run, unused)
        for run in (by_arithmetic, by_index)
    ]
    return Wrong("invariance", "what is masked is multiplied by 0 instead of left out: NaN comes through", *cases)
