"""P12: selected log-probability from bfloat16 logits, 4096 x 151936, against the copy bandwidth of the same card.

The logits are read once, so the bar is a share of the measured copy bandwidth: bytes of the logits over the time.
Beside it stand torch's log_softmax and gather, batch_invariant_ops and Liger's cross entropy, when they are installed.

Usage: python tools/bench/p12_selected_logprob.py (needs a CUDA device; `tools/device_check` runs it too)
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from device_check.card import copy_bandwidth, rates
from device_check.clock import Clock
from device_check.report import Row, judged, line, unmeasured

from rlk_ledger_kernels.ops.selected_logprob import torch as torch_backend
from rlk_ledger_kernels.ops.selected_logprob.contract import LogprobContract

BAR = 0.85
SHAPES = {"large": (4096, 151936), "small": (8, 700)}


def rows(clock: Clock, bandwidth: float, size: str = "large") -> Iterator[Row]:
    """One row for each candidate. bandwidth: bytes per second of a copy, measured on the same card."""
    count, vocabulary = SHAPES[size]
    generator = torch.Generator(clock.device).manual_seed(0)
    logits_NV = torch.randn((count, vocabulary), device=clock.device, dtype=torch.bfloat16, generator=generator)
    tokens_N = torch.randint(0, vocabulary, (count,), device=clock.device, generator=generator)
    if bandwidth <= 0:
        bandwidth = copy_bandwidth(rates(clock))
    name = f"{count} x {vocabulary} bfloat16"
    native_ms = clock.median_ms(lambda: plain(logits_NV, tokens_N))
    yield _row(f"torch log_softmax and gather, {name}", native_ms, logits_NV, bandwidth, native_ms)
    for who, make in _candidates():
        try:
            call = make(logits_NV, tokens_N)
            error = float((call() - plain(logits_NV, tokens_N)).abs().max())
            ms = clock.median_ms(call)
        except Exception as problem:  # what is not installed or does not build is a row, and the rest goes on
            yield unmeasured("P12", f"{who}, {name}", problem)
            continue
        yield _row(f"{who}, {name}", ms, logits_NV, bandwidth, native_ms, error, who == "triton", clock.timed)


def plain(logits_NV: torch.Tensor, tokens_N: torch.Tensor) -> torch.Tensor:
    """What jobs write: a float32 log-softmax of everything, and a gather."""
    return torch.log_softmax(logits_NV, -1, dtype=torch.float32).gather(1, tokens_N[:, None])[:, 0]


Make = Callable[[torch.Tensor, torch.Tensor], Callable[[], torch.Tensor]]


def _candidates() -> tuple[tuple[str, Make], ...]:
    return (
        ("triton", _triton),
        ("torch backend", _torch_backend),
        ("batch_invariant_ops", _batch_invariant_ops),
        ("Liger cross entropy", _liger),
    )


def _triton(logits_NV: torch.Tensor, tokens_N: torch.Tensor) -> Callable[[], torch.Tensor]:
    backend = import_module("rlk_ledger_kernels.ops.selected_logprob.triton")
    contract = LogprobContract(logits="bfloat16")
    return lambda: torch.as_tensor(backend.selected_logprob(logits_NV, tokens_N, contract))


def _torch_backend(logits_NV: torch.Tensor, tokens_N: torch.Tensor) -> Callable[[], torch.Tensor]:
    contract = LogprobContract(logits="bfloat16")
    return lambda: torch_backend.selected_logprob(logits_NV, tokens_N, contract)


def _batch_invariant_ops(logits_NV: torch.Tensor, tokens_N: torch.Tensor) -> Callable[[], torch.Tensor]:
    log_softmax = import_module("batch_invariant_ops.batch_invariant_ops").log_softmax
    return lambda: log_softmax(logits_NV, dim=-1).gather(1, tokens_N[:, None])[:, 0].to(torch.float32)


def _liger(logits_NV: torch.Tensor, tokens_N: torch.Tensor) -> Callable[[], torch.Tensor]:
    cross_entropy = import_module("liger_kernel.transformers.functional").liger_cross_entropy
    own_NV = logits_NV.clone()  # some versions write the gradient over their operand

    def call() -> torch.Tensor:
        loss = cross_entropy(own_NV, tokens_N, reduction="none")
        return -(loss[0] if isinstance(loss, tuple) else loss)

    return call


def _row(
    name: str,
    ms: float,
    logits_NV: torch.Tensor,
    bandwidth: float,
    native_ms: float,
    error: float = 0.0,
    barred: bool = False,
    timed: bool = True,
) -> Row:
    share = logits_NV.numel() * logits_NV.element_size() / (ms * 1e-3) / bandwidth
    detail = f"{native_ms / ms:.2f} times as fast as torch; farthest from it by {error:.2g}"
    if barred:
        return judged("P12", name, share, BAR, timed, value=ms, unit="ms", against="copy bandwidth", detail=detail)
    return Row(
        section="P12",
        name=name,
        state="measured",
        value=ms,
        unit="ms",
        against="copy bandwidth",
        ratio=share,
        detail=detail,
    )


def main() -> None:
    """Measure on the CUDA device, or say that there is none."""
    if not torch.cuda.is_available():
        print("P12 is not measured here: torch sees no CUDA device")
        return
    for row in rows(Clock("cuda"), 0.0):
        print(line(row))


if __name__ == "__main__":
    main()
