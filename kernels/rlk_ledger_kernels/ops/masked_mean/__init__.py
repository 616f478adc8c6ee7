"""Sums over active tokens, exact and so the same however tokens are sharded; means divide once, by the global count."""

from rlk_ledger_kernels.descriptors import Backend, Operator

OPERATOR = Operator(
    name="masked_mean",
    package=__name__,
    chain=100,
    op_class="reduction",
    surface=("masked_sums", "masked_sum", "masked_mean"),
    backends=(
        Backend(
            name="triton",
            bucket="contract_preserving",
            devices=("cuda", "cpu"),
            parallel=("single", "tp", "sp", "cp"),
            needs=("triton",),
            enable="pip install triton; on a CPU also set TRITON_INTERPRET=1",
            fallback="torch",
        ),
        Backend(
            name="torch",
            bucket="contract_preserving",
            devices=("cpu", "cuda"),
            parallel=("single", "tp", "sp", "cp"),
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
