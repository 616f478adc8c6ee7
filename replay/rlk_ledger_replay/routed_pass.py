"""The rollout's reference along the experts its engine really used, where it recorded them."""

from __future__ import annotations

from collections.abc import Sequence

from rlk_ledger.pairs import PairedSample
from rlk_ledger_replay.adapters import How
from rlk_ledger_replay.checkpoint import ModelConfig
from rlk_ledger_replay.gates import Gate
from rlk_ledger_replay.numerics import Numerics
from rlk_ledger_replay.routes import Coverage, routes_of, why_unroutable
from rlk_ledger_replay.scores import Pass
from rlk_ledger_replay.semantics import Declared

ROUTED = "rollout.routed"
"""The pass along recorded routes; samples without any are not in it."""


def routed_pass(
    pairs: Sequence[PairedSample], rollout: Sequence[Declared], config: ModelConfig, how: How | None
) -> tuple[tuple[Pass, ...], Coverage | None, list[Gate]]:
    """The pass where there are routes, what they cover, and a gate that fails them when they are incomplete.

    rollout: what that side declared, by pair. Nothing for a dense model, and for a run without routes.
    """
    experts = config.experts
    told = [pair.sample for pair in pairs if pair.sample.routed_experts]
    if experts is None or not told:
        return (), None, []
    unfit = why_unroutable(told, experts)
    if unfit is not None:
        return (), None, [Gate("evidence.routes", "unknown", unfit)]
    if how is not None:
        return (), None, [Gate("evidence.routes", "unknown", "routes are not replayed under an adapter")]
    routes = [routes_of(pair.sample) for pair in pairs]
    layers = len(experts.layers)
    pairs_all = sum(_inputs(pair) * layers for pair in pairs)
    covered = sum(int((one >= 0).all(axis=-1).sum()) for one in routes if one is not None)
    coverage = Coverage(pairs_all, covered)
    if not covered:
        return (), coverage, [Gate("evidence.routes", "unknown", "no route was recorded that can be replayed")]
    numerics: tuple[Numerics | None, ...] = tuple(
        None if one is None else declared.reference for one, declared in zip(routes, rollout, strict=True)
    )
    share = covered / pairs_all
    if covered < pairs_all:
        reason = f"recorded routes cover {share:.1%} of the scored tokens and layers"
        gate = Gate("evidence.routes", "unknown", reason, coverage.as_dict())
    else:
        gate = Gate("evidence.routes", "passed", "a route was recorded for every token and layer", coverage.as_dict())
    return (Pass(ROUTED, numerics, "routed"),), coverage, [gate]


def _inputs(pair: PairedSample) -> int:
    prompt = pair.sample.prompt_token_ids
    return (0 if prompt is None else len(prompt)) + len(pair.sample.response_token_ids) - 1
