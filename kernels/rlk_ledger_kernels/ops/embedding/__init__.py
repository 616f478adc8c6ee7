"""Rows of a table, copied exactly."""

from rlk_ledger_kernels.descriptors import Backend, Operator

OPERATOR = Operator(
    name="embedding",
    package=__name__,
    chain=10,
    op_class="elementwise",
    surface=("embedding",),
    backends=(
        Backend(name="torch", bucket="contract_preserving", devices=("cpu",)),
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
