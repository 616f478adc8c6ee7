"""Root-mean-square normalisation over the last dimension."""

from rlk_ledger_kernels.descriptors import Backend, Operator

OPERATOR = Operator(
    name="rms_norm",
    package=__name__,
    chain=20,
    op_class="reduction",
    surface=("rms_norm",),
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
