"""`attn.rope_fusion`: how queries and keys are rotated: fused or not, and in which dtype."""

from rlk_ledger_replay.factors.factor import Factor

FACTOR = Factor(
    factor="attn.rope_fusion",
    title="how queries and keys are rotated: fused or not, and in which dtype",
    predicts="an error that grows with the position",
    intervention="Run both engines with the unfused rotation and a float32 table.",
)
