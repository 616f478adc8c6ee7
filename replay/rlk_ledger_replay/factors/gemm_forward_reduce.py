"""`gemm.forward_reduce`: how shares of row-parallel products are reduced."""

from rlk_ledger_replay.factors.factor import Factor

FACTOR = Factor(
    factor="gemm.forward_reduce",
    title="how shares of row-parallel products are reduced",
    predicts="an error after every output and down projection",
    intervention="Score with tensor parallelism 1, or reduce in float32 in rank order.",
    guards=("collective.pinned",),
)
