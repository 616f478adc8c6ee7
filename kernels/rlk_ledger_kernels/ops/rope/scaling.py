"""Frequencies of a rotary embedding and how models stretch them to longer contexts.

Formulas as in Hugging Face's `modeling_rope_utils` (names of fields too); float32 throughout and always computed on the
CPU, so a frequency never depends on the device that reads it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from rlk_ledger_kernels.errors import ContractError, OperandError

SCALINGS = ("default", "linear", "llama3", "yarn", "dynamic")


@dataclass(frozen=True)
class RopeScaling:
    """How frequencies are stretched.

    kind: one of SCALINGS. original_max_position: context length of pretraining (`llama3`, `yarn`) or the model's
    max_position_embeddings (`dynamic`). attention_factor: factor on cosines and sines (`yarn`), None to derive it from
    factor, mscale and mscale_all_dim. beta_fast, beta_slow: rotations that bound yarn's ramp; truncate: whether its
    ends are whole dimensions.
    """

    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


def frequencies(
    head_dim: int, theta: float, scaling: RopeScaling | None = None, length: int | None = None
) -> torch.Tensor:
    """Angle per position of each pair: theta^(-2i/D), stretched as declared; float32 [head_dim/2] on the CPU.

    head_dim: the number of dimensions that turn. length: for `dynamic`, how long the longest sequence is; it is a
    parameter and not read from a batch, because a frequency that follows the batch cannot be batch-invariant. None,
    or at most original_max_position, leaves the frequencies as they were trained.
    Raises ContractError for an unknown scaling or a factor that stretches nothing, OperandError for an odd head_dim.
    Sources: linear (kaiokendev 2023), dynamic (NTK-aware, bloc97 and emozilla 2023), yarn (Peng et al. 2023),
    llama3 (the Llama 3.1 release).
    """
    if head_dim % 2 or head_dim < 2:
        raise OperandError(f"rope: head_dim is {head_dim}; a rotation needs an even one")
    scaling = scaling or RopeScaling()
    if scaling.kind not in SCALINGS:
        raise ContractError(f"rope: scaling {scaling.kind!r} is not implemented; known are {', '.join(SCALINGS)}")
    if not 0 < scaling.factor < math.inf or scaling.original_max_position < 1:
        raise ContractError(
            f"rope: factor {scaling.factor} over {scaling.original_max_position} positions; both must be above 0"
        )
    if scaling.kind == "dynamic":
        return _plain(head_dim, _dynamic_theta(head_dim, theta, scaling, length))
    if scaling.kind == "yarn":
        return _yarn(head_dim, theta, scaling)
    base_F = _plain(head_dim, theta)
    if scaling.kind == "linear":
        return base_F / scaling.factor
    return _llama3(base_F, scaling) if scaling.kind == "llama3" else base_F


def attention_factor(scaling: RopeScaling | None) -> float:
    """The factor yarn puts on cosines and sines: 0.1 * mscale * ln(factor) + 1, 1.0 for every other scaling."""
    if scaling is None or scaling.kind != "yarn":
        return 1.0
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.mscale and scaling.mscale_all_dim:
        return _mscale(scaling.factor, scaling.mscale) / _mscale(scaling.factor, scaling.mscale_all_dim)
    return _mscale(scaling.factor, 1.0)


def _mscale(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def _powers(head_dim: int, theta: float) -> torch.Tensor:
    exponents_F = torch.arange(0, head_dim, 2, dtype=torch.int64).to(torch.float32) / head_dim
    powers_F: torch.Tensor = theta**exponents_F
    return powers_F


def _plain(head_dim: int, theta: float) -> torch.Tensor:
    return 1.0 / _powers(head_dim, theta)


def _dynamic_theta(head_dim: int, theta: float, scaling: RopeScaling, length: int | None) -> float:
    if head_dim == 2:
        raise ContractError("rope: dynamic scaling divides by head_dim - 2; it needs more than one pair")
    trained = scaling.original_max_position
    longest = max(length or trained, trained)
    stretch = (scaling.factor * longest / trained) - (scaling.factor - 1)
    new_theta: float = theta * stretch ** (head_dim / (head_dim - 2))
    return new_theta


def _llama3(base_F: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    wavelength_F = 2 * math.pi / base_F
    slow = scaling.original_max_position / scaling.low_freq_factor
    fast = scaling.original_max_position / scaling.high_freq_factor
    ramp_F = (scaling.original_max_position / wavelength_F - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    blended_F = (1 - ramp_F) * base_F / scaling.factor + ramp_F * base_F
    stretched_F = torch.where(wavelength_F > slow, base_F / scaling.factor, blended_F)
    return torch.where(wavelength_F < fast, base_F, stretched_F)


def _yarn(head_dim: int, theta: float, scaling: RopeScaling) -> torch.Tensor:
    powers_F = _powers(head_dim, theta)
    low, high = (
        _turning_dimension(turns, head_dim, theta, scaling) for turns in (scaling.beta_fast, scaling.beta_slow)
    )
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # a step instead of a division by zero
    ramp_F = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    kept_F = 1 - ramp_F
    return 1.0 / (scaling.factor * powers_F) * (1 - kept_F) + 1.0 / powers_F * kept_F


def _turning_dimension(turns: float, head_dim: int, theta: float, scaling: RopeScaling) -> float:
    """The dimension that turns `turns` times over the pretraining context."""
    return head_dim * math.log(scaling.original_max_position / (turns * 2 * math.pi)) / (2 * math.log(theta))
