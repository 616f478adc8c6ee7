"""`logp.downcast_placement`: where logits or log-probabilities are rounded."""

from rlk_ledger_replay.factors.factor import Factor

FACTOR = Factor(
    factor="logp.downcast_placement",
    title="where logits or log-probabilities are rounded",
    predicts="values on the grid of a narrow dtype",
    intervention="Convert logits to float32 before the log-softmax, and record float32.",
)
