"""`norm.rounding_order`: where a norm rounds: before its weight or after, and the residual stream."""

from rlk_ledger_replay.factors.factor import Factor

FACTOR = Factor(
    factor="norm.rounding_order",
    title="where a norm rounds: before its weight or after, and the residual stream",
    predicts="an error at every norm",
    intervention="Use the same norm kernel on both sides.",
)
