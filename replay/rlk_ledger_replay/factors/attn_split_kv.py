"""`attn.split_kv`: how a long key-value range is split and its parts merged."""

from rlk_ledger_replay.factors.factor import Factor

FACTOR = Factor(
    factor="attn.split_kv",
    title="how a long key-value range is split and its parts merged",
    predicts="an error that appears once the context exceeds one split",
    intervention="Pin num_splits to 1 and score again.",
    guards=("live.vllm.splits",),
)
