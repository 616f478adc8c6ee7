"""`logp.head_dtype`: the dtype the head multiplies in."""

from rlk_ledger_replay.factors.factor import Factor

FACTOR = Factor(
    factor="logp.head_dtype",
    title="the dtype the head multiplies in",
    predicts="steps of the dtype in the logits",
    intervention="Run the head in float32 on both sides.",
)
