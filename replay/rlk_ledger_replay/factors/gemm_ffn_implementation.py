"""`gemm.ffn_implementation`: whether silu(gate) is rounded before the product."""

from rlk_ledger_replay.factors.factor import Factor

FACTOR = Factor(
    factor="gemm.ffn_implementation",
    title="whether silu(gate) is rounded before the product",
    predicts="an error after every MLP",
    intervention="Use the same activation kernel on both sides.",
)
