"""The gated activation silu(gate) * up."""

from rlk_ledger_kernels.descriptors import Backend, Operator

OPERATOR = Operator(
    name="swiglu",
    package=__name__,
    chain=60,
    op_class="elementwise",
    surface=("swiglu",),
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
