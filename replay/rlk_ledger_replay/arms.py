"""The four arms: recorded or reference values on each side, and what is left of the drift.

`both_native` is the drift itself. Putting the deterministic reference in one side's place shows what that side
brought in. `both_reference` must be bitwise zero, or nothing else is believed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from rlk_ledger.metrics import Drift, measure
from rlk_ledger_replay.decision import ArmCounts
from rlk_ledger_replay.floor import CLIP_HIGH, CLIP_LOW
from rlk_ledger_replay.scores import Float32, Tokens

ArmName = Literal["both_native", "training_reference_only", "rollout_reference_only", "both_reference"]
ARMS: tuple[ArmName, ...] = get_args(ArmName)


@dataclass(frozen=True)
class Arm:
    """One arm: its name, its drift over the compared tokens, and whether what it asks for ran."""

    arm: ArmName
    drift: Drift
    applied: bool = True
    reason: str = ""


@dataclass(frozen=True)
class References:
    """The reference's values, float32 nats [N]: training's semantics by prefill, rollout's by decode and by prefill."""

    training_prefill: Float32
    rollout_decode: Float32
    rollout_prefill: Float32


def score_arms(tokens: Tokens, reference: References, wanted: tuple[ArmName, ...] = ARMS) -> list[Arm]:
    """The drift of each wanted arm. `both_reference` compares the two paths under the rollout's semantics."""
    sides: Mapping[ArmName, tuple[Float32, Float32]] = {
        "both_native": (tokens.rollout_N, tokens.training_N),
        "training_reference_only": (tokens.rollout_N, reference.training_prefill),
        "rollout_reference_only": (reference.rollout_decode, tokens.training_N),
        "both_reference": (reference.rollout_decode, reference.rollout_prefill),
    }
    return [Arm(name, measure(*sides[name], sample=tokens.pair_N)) for name in ARMS if name in wanted]


def arm_counts(arms: list[Arm], tokens: Tokens) -> ArmCounts | None:
    """What the decision needs of the arms, or None while one of the three informative arms is missing."""
    clip = {arm.arm: arm.drift.values.get("clip_fraction") for arm in arms if arm.applied}
    native, training, rollout = (clip.get(name) for name in ARMS[:3])
    if native is None or training is None or rollout is None:
        return None
    d = tokens.training_N.astype(np.float64) - tokens.rollout_N
    clipped = (d < CLIP_LOW) | (d > CLIP_HIGH)
    return ArmCounts(
        both_native=native,
        training_reference_only=training,
        rollout_reference_only=rollout,
        clipped=int(clipped.sum()),
        groups=len(np.unique(tokens.cluster_N[clipped])),
    )


def chain(tokens: Tokens, reference: References) -> dict[str, dict[str, float]]:
    """t/r = (t / prefill) x (prefill / decode) x (decode / r) as log-ratios, over tokens and summed over samples.

    Per link: mean, RMS and max of abs in nats a token, and the mean over samples of the summed log-ratio, which add
    up to the drift's own. The middle link is the reference's two paths where both sides have one semantics.
    """
    links = {
        "training_over_prefill": tokens.training_N.astype(np.float64) - reference.training_prefill,
        "prefill_over_decode": reference.training_prefill.astype(np.float64) - reference.rollout_decode,
        "decode_over_rollout": reference.rollout_decode.astype(np.float64) - tokens.rollout_N,
        "training_over_rollout": tokens.training_N.astype(np.float64) - tokens.rollout_N,
    }
    samples = len(np.unique(tokens.pair_N))
    return {
        name: {
            "mean": float(value.mean()),
            "rms": float(np.sqrt((value**2).mean())),
            "max": float(np.abs(value).max()),
            "sample_sum": float(value.sum() / samples),
        }
        for name, value in links.items()
    }
