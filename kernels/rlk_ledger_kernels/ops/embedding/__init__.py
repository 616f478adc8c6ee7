"""Rows of a table, copied exactly, whole or sharded by vocabulary."""

from rlk_ledger_kernels.descriptors import Backend, Operator

OPERATOR = Operator(
    name="embedding",
    package=__name__,
    chain=10,
    op_class="elementwise",
    surface=("embedding", "embedding_shard"),
    backends=(
        Backend(
            name="triton",
            bucket="contract_preserving",
            devices=("cuda", "cpu"),
            autograd=("forward", "backward"),
            parallel=("single", "tp"),
            needs=("triton",),
            enable="pip install triton; on a CPU also set TRITON_INTERPRET=1",
            fallback="torch",
        ),
        Backend(
            name="torch",
            bucket="contract_preserving",
            devices=("cpu", "cuda"),
            parallel=("single", "tp"),
            autograd=("forward", "backward"),
        ),
        Backend(
            name="reference",
            bucket="reference",
            devices=("cpu", "cuda"),
            dtypes=("float32",),  # it takes any, but keeps the contract's roundings only where they are none
            deterministic=False,
            batch_invariant=False,
            fallback=None,
        ),
    ),
)
