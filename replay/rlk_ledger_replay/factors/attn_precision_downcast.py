"""`attn.precision_downcast`: where attention rounds: its weights, its cache."""

from rlk_ledger_replay.factors.factor import Factor

FACTOR = Factor(
    factor="attn.precision_downcast",
    title="where attention rounds: its weights, its cache",
    predicts="an error in every head that the mask leaves more than one key",
    intervention="Keep the softmax weights and the cache in float32.",
)
