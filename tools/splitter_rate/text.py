"""Log-probabilities of mixed text, and what two engines make of them.

A response is a chain of segments of kinds of text (boilerplate, prose, code, mathematics, dialogue); each kind has its
own distribution of log-probabilities. Two engines then see the same truth through noise at the place where they round.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

Float64 = Any
Rng = np.random.Generator


def _confident(rng: Rng, n: int) -> Float64:
    return -(10.0 ** rng.uniform(-7, -2.5, n))


def _blend(share: float, shape: float, scale: float) -> Callable[[Rng, int], Float64]:
    def draw(rng: Rng, n: int) -> Float64:
        return np.where(rng.random(n) < share, _confident(rng, n), -rng.gamma(shape, scale, n) - 1e-6)

    return draw


TEXT: dict[str, Callable[[Rng, int], Float64]] = {
    "boilerplate": _blend(0.97, 1.0, 0.5),
    "prose": _blend(0.25, 1.0, 0.9),
    "code": _blend(0.75, 0.8, 1.0),
    "mathematics": _blend(0.5, 1.2, 0.7),
    "dialogue": _blend(0.1, 1.4, 1.2),
}


def truth(rng: Rng, n: int, main: str, difficulty: float) -> Float64:
    """n true log-probabilities (nats): segments of 5 to 40 tokens, 70 % of them of the kind `main`."""
    out, at, kinds = np.empty(n), 0, list(TEXT)
    while at < n:
        end = min(n, at + int(rng.integers(5, 41)))
        kind = main if rng.random() < 0.7 else kinds[int(rng.integers(len(kinds)))]
        out[at:end] = TEXT[kind](rng, end - at)
        at = end
    return np.maximum(out * difficulty, -40.0)


def bfloat16(values: Float64) -> Float64:
    """Values rounded to bfloat16, as float64."""
    bits = np.asarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32).astype(np.float64)


def both_sides(rng: Rng, true: Float64, noise: Float64, rounding: str, tail_df: float) -> tuple[Any, Any]:
    """What two engines record (float32) of the same tokens: `noise` (nats a token) before the place of rounding.

    `rounding`: none; logits (bfloat16 logits: equal or whole quanta apart); values (bfloat16 log-probabilities);
    saturated (probabilities near one become exactly one).
    """

    def tails() -> Float64:
        return rng.standard_t(tail_df, len(true)) if tail_df < 1e5 else rng.normal(size=len(true))

    free = 1.0 - np.exp(true) + 1e-4
    quantum = 2.0 ** float(rng.integers(-6, -3))
    sides = []
    for _ in range(2):
        if rounding == "logits":
            shift = noise * tails()
            steps = np.round(shift / quantum + rng.uniform(-0.5, 0.5, len(true))) * quantum
            seen = true + free * steps + free * noise * 0.05 * tails()
        else:
            seen = true + free * noise * tails()
        seen = np.where(seen > 0, -np.abs(seen) * 1e-3, seen)
        if rounding == "values":
            seen = bfloat16(seen)
        if rounding == "saturated":
            seen = np.where(seen > -2e-4, 0.0, seen)
        sides.append(np.asarray(seen, np.float32))
    return sides[0], sides[1]
