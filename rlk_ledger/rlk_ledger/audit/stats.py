"""The few distributions the audit needs, without scipy.

Permutation tests use the exact mean and variance of the permutation distribution with a normal tail, and never report
less than one over the number of distinct permutations.
"""

from math import erfc, exp, lgamma, log, sqrt

import numpy as np
import numpy.typing as npt

Float64 = npt.NDArray[np.float64]
Index = npt.NDArray[np.int64]


def normal_tail(z: float) -> float:
    """P(Z > z) of a standard normal."""
    return 0.5 * erfc(z / sqrt(2.0))


def student_tail(t: float, df: float) -> float:
    """P(T > t) of Student's t with `df` degrees of freedom, through the incomplete beta function (DLMF 8.17)."""
    if df <= 0:
        return 1.0
    half = 0.5 * _beta_inc(df / 2.0, 0.5, df / (df + t * t))
    return half if t > 0 else 1.0 - half


def _beta_inc(a: float, b: float, x: float) -> float:
    """The regularised incomplete beta function I_x(a, b)."""
    if x <= 0.0 or x >= 1.0:
        return 0.0 if x <= 0.0 else 1.0
    front = exp(lgamma(a + b) - lgamma(a) - lgamma(b) + a * log(x) + b * log(1.0 - x))
    if x < (a + 1.0) / (a + b + 2.0):
        return front * _fraction(a, b, x) / a
    return 1.0 - front * _fraction(b, a, 1.0 - x) / b


def _fraction(a: float, b: float, x: float) -> float:
    """Lentz's evaluation of the continued fraction of DLMF 8.17.22."""
    tiny = 1e-300
    c, d = 1.0, 1.0 / max(1.0 - (a + b) * x / (a + 1.0), tiny)
    value = d
    for m in range(1, 300):
        for step in (
            m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)),
            -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1)),
        ):
            d = 1.0 / (1.0 + step * d or tiny)
            c = 1.0 + step / c or tiny
            value *= c * d
        if abs(c * d - 1.0) < 1e-14:
            break
    return value


def permutation_tail(x: Float64, member: npt.NDArray[np.bool_], stratum: Index) -> tuple[float, float]:
    """(effect, p) of larger `x` among members, membership permuted within each stratum.

    `effect` is the mean over strata of member mean minus non-member mean, weighted by n1 n0 / n; strata with one kind
    only carry nothing. p is one-sided.
    """
    k = int(stratum.max()) + 1 if stratum.size else 0
    n = np.bincount(stratum, minlength=k).astype(np.float64)
    n1 = np.bincount(stratum, weights=member, minlength=k)
    n0 = n - n1
    mean = np.bincount(stratum, weights=x, minlength=k) / np.maximum(n, 1.0)
    centred = x - mean[stratum]
    use = (n1 > 0) & (n0 > 0)
    if not use.any():
        return 0.0, 1.0
    total = float(np.bincount(stratum, weights=centred * member, minlength=k)[use].sum())
    spread = np.bincount(stratum, weights=np.square(centred), minlength=k)[use]
    weight = n1[use] * n0[use] / n[use]
    variance = float((weight / (n[use] - 1.0) * spread).sum())
    effect = total / float(weight.sum())
    if variance <= 0.0:
        return effect, 1.0
    fewest = -sum(_log_choose(a, b) for a, b in zip(n[use].tolist(), n1[use].tolist()))
    return effect, max(normal_tail(total / sqrt(variance)), exp(max(fewest, -700.0)))


def _log_choose(n: float, k: float) -> float:
    return lgamma(n + 1.0) - lgamma(k + 1.0) - lgamma(n - k + 1.0)


def sign_flip_tail(contrast: Float64) -> tuple[float, float]:
    """(mean, p) of contrasts whose signs are exchangeable when nothing differs; p is one-sided."""
    n = len(contrast)
    norm = float(np.sqrt(np.dot(contrast, contrast)))
    if n == 0 or norm == 0.0:
        return 0.0, 1.0
    z = float(contrast.sum()) / norm
    return float(contrast.mean()), max(normal_tail(z), exp(-min(n * log(2.0), 700.0)))


def welch_tail(left: Float64, right: Float64) -> float:
    """One-sided p that the mean of `left` exceeds that of `right` (Welch 1947)."""
    if len(left) < 2 or len(right) < 2:
        return 1.0
    a, b = left.var(ddof=1) / len(left), right.var(ddof=1) / len(right)
    if a + b <= 0.0:
        return 0.0 if left.mean() > right.mean() else 1.0
    df = (a + b) ** 2 / (a**2 / (len(left) - 1) + b**2 / (len(right) - 1))
    return student_tail(float((left.mean() - right.mean()) / sqrt(a + b)), float(df))


def mean_tail(x: Float64) -> float:
    """One-sided p that the mean of `x` exceeds 0 (Student)."""
    if len(x) < 2:
        return 1.0
    scale = float(x.std(ddof=1)) / sqrt(len(x))
    if scale == 0.0:
        return 0.0 if x.mean() > 0 else 1.0
    return student_tail(float(x.mean()) / scale, len(x) - 1.0)


def holm(p: list[float]) -> list[float]:
    """Holm's adjusted p values (Holm 1979), in the order given."""
    order = sorted(range(len(p)), key=p.__getitem__)
    out, running = [1.0] * len(p), 0.0
    for rank, index in enumerate(order):
        running = max(running, min(1.0, (len(p) - rank) * p[index]))
        out[index] = running
    return out
