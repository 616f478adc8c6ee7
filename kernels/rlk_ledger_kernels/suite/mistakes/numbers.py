"""Wrong operators that are batch-invariant: only their numbers give them away, to the reference or to a twin."""

from __future__ import annotations

from functools import partial
from types import ModuleType

import torch

from rlk_ledger_kernels.suite.case import RowCase, Rows, Wrong
from rlk_ledger_kernels.suite.mistakes.plain import draw, log_sum_exp, product, summed

ROWS, K, OUTPUTS, VOCABULARY, RANKS = 130, 192, 6, 40, 4
TEMPERATURE = 0.7


def number_mistakes() -> list[Wrong]:
    """bf16 accumulation, a missing temperature, a mean of rank LSEs; and for parity, two readings of one contract."""
    hidden = (draw(5, ROWS, K).to(torch.bfloat16),)
    logits = (draw(6, ROWS, VOCABULARY) * 3, torch.arange(ROWS) % VOCABULARY)
    weight_OK = (draw(7, OUTPUTS, K) + 1.0).to(torch.bfloat16)

    def linear_reference(rows: Rows) -> torch.Tensor:
        return rows[0].to(torch.float32) @ weight_OK.to(rows[0].device, torch.float32).T

    linear = RowCase("linear", "plain sums", "bfloat16", hidden, partial(_linear, weight_OK), linear_reference)
    logprob = RowCase(
        "selected_logprob", "plain sums", "float32", logits, partial(_logprob, TEMPERATURE), _logprob_reference
    )
    forgotten = _with(logprob, partial(_logprob, 1.0))
    return [
        Wrong(
            "accuracy",
            "the sum over K is rounded to bfloat16 at every step (bf16 accumulation)",
            _with(linear, partial(_narrow, weight_OK)),
            linear,
        ),
        Wrong("accuracy", "the logits are not divided by the temperature", forgotten, logprob),
        Wrong(
            "accuracy",
            "each rank takes its own log-sum-exp and the ranks are averaged (mean of rank LSEs)",
            _with(logprob, _mean_of_ranks),
            logprob,
        ),
        Wrong(
            "accuracy",
            "NaN is replaced by a number on the way in (NaN swallowed)",
            _with(linear, partial(_cleaned, weight_OK)),
            linear,
        ),
        Wrong(
            "accuracy",
            "exp() is taken of the logits themselves (overflow without a maximum)",
            _with(logprob, _without_maximum),
            logprob,
        ),
        Wrong("parity", "one backend divides the logits by the temperature, the other does not", forgotten, logprob),
        Wrong(
            "parity",
            "one backend leaves out the last leaf of K",
            _with(linear, partial(_short, weight_OK)),
            linear,
        ),
    ]


def _with(case: RowCase, run: object) -> RowCase:
    return RowCase(case.operator, case.name, case.dtype, case.rows, run, case.reference)  # type: ignore[arg-type]


def _linear(weight_OK: torch.Tensor, _: ModuleType, rows: Rows) -> torch.Tensor:
    return product(rows[0], weight_OK).to(torch.bfloat16)


def _cleaned(weight_OK: torch.Tensor, _: ModuleType, rows: Rows) -> torch.Tensor:
    return product(rows[0].nan_to_num(), weight_OK).to(torch.bfloat16)


def _short(weight_OK: torch.Tensor, _: ModuleType, rows: Rows) -> torch.Tensor:
    return product(rows[0][:, :-64], weight_OK[:, :-64]).to(torch.bfloat16)


def _narrow(weight_OK: torch.Tensor, _: ModuleType, rows: Rows) -> torch.Tensor:
    terms = rows[0][:, None, :] * weight_OK.to(rows[0].device)[None]
    return summed(terms)  # bfloat16 terms and sums


def _scaled(rows: Rows, temperature: float) -> torch.Tensor:
    return rows[0] / temperature


def _logprob(temperature: float, _: ModuleType, rows: Rows) -> torch.Tensor:
    scaled_NV = _scaled(rows, temperature)
    return scaled_NV.gather(1, rows[1][:, None])[:, 0] - log_sum_exp(scaled_NV, [VOCABULARY])


def _without_maximum(_: ModuleType, rows: Rows) -> torch.Tensor:
    scaled_NV = _scaled(rows, TEMPERATURE)
    return scaled_NV.gather(1, rows[1][:, None])[:, 0] - scaled_NV.exp().sum(-1).log()


def _mean_of_ranks(_: ModuleType, rows: Rows) -> torch.Tensor:
    scaled_NV = _scaled(rows, TEMPERATURE)
    parts = scaled_NV.chunk(RANKS, dim=1)
    lse_N = sum((log_sum_exp(part, [part.shape[1]]) for part in parts), torch.zeros_like(scaled_NV[:, 0])) / RANKS
    return scaled_NV.gather(1, rows[1][:, None])[:, 0] - lse_N


def _logprob_reference(rows: Rows) -> torch.Tensor:
    return torch.log_softmax(_scaled(rows, TEMPERATURE), -1).gather(1, rows[1][:, None])[:, 0]
