"""`logp.lse_merge_order`: how parts of the log-sum-exp over the vocabulary are merged."""

from rlk_ledger_replay.factors.factor import Factor

FACTOR = Factor(
    factor="logp.lse_merge_order",
    title="how parts of the log-sum-exp over the vocabulary are merged",
    predicts="one error for all tokens of a position",
    intervention="Merge the parts in float32 in vocabulary order.",
)
