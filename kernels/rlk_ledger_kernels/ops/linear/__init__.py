"""Matrix product with a weight stored as [out, in]."""

from rlk_ledger_kernels.descriptors import Backend, Operator

OPERATOR = Operator(
    name="linear",
    package=__name__,
    chain=30,
    op_class="reduction",
    surface=("pack_linear", "linear"),
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
