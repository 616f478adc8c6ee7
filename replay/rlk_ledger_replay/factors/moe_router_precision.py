"""`moe.router_precision`: the dtype of a router's logits."""

from rlk_ledger_replay.factors.factor import Factor

FACTOR = Factor(
    factor="moe.router_precision",
    title="the dtype of a router's logits",
    predicts="tokens near a tie take other experts",
    intervention="Run routers in float32 on both sides, or replay the recorded routes.",
    guards=("routes.complete",),
    needs_experts=True,
)
