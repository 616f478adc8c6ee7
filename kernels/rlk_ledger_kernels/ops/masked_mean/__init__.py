"""Sum over active tokens divided by their global count; never a mean of means."""

from rlk_ledger_kernels.descriptors import Backend, Operator

OPERATOR = Operator(
    name="masked_mean",
    package=__name__,
    chain=100,
    op_class="reduction",
    surface=("masked_mean",),
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
