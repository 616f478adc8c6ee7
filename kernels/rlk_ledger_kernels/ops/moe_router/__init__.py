"""The router of a mixture of experts: which experts a token goes to, with which weight; and weights of given routes."""

from rlk_ledger_kernels.descriptors import Backend, Operator

OPERATOR = Operator(
    name="moe_router",
    package=__name__,
    chain=64,
    op_class="elementwise",
    surface=("moe_router", "routed_weights", "moe_router_backward"),
    backends=(
        Backend(
            name="triton",
            bucket="contract_preserving",
            devices=("cuda", "cpu"),
            autograd=("forward", "backward"),
            needs=("triton",),
            enable="pip install triton; on a CPU also set TRITON_INTERPRET=1",
            fallback="torch",
        ),
        Backend(
            name="torch",
            bucket="contract_preserving",
            devices=("cpu", "cuda"),
            autograd=("forward", "backward"),
        ),
        Backend(
            name="reference",
            bucket="reference",
            devices=("cpu", "cuda"),
            dtypes=("float32",),  # it takes any, but keeps the contract's roundings only where they are none
            autograd=("forward", "backward"),
            deterministic=False,
            batch_invariant=False,
            fallback=None,
        ),
    ),
)
