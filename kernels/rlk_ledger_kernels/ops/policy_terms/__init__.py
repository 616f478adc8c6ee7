"""Per-token fragments of a policy loss: importance ratio, KL estimates k1, k2, k3, clipped surrogate."""

from rlk_ledger_kernels.descriptors import Backend, Operator

OPERATOR = Operator(
    name="policy_terms",
    package=__name__,
    chain=95,
    op_class="logprob",
    surface=("policy_terms",),
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
            deterministic=False,
            batch_invariant=False,
            fallback=None,
        ),
    ),
)
