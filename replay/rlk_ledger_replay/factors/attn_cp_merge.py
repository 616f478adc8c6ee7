"""`attn.cp_merge`: how outputs of context-parallel ranks are merged."""

from rlk_ledger_replay.factors.factor import Factor

FACTOR = Factor(
    factor="attn.cp_merge",
    title="how outputs of context-parallel ranks are merged",
    predicts="an error from the first position a second rank holds",
    intervention="Score with context parallelism 1, or merge in float32.",
    guards=("live.vllm.merge",),
)
