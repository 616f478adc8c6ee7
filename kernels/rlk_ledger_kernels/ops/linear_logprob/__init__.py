"""Log-probability of one chosen token per row from hidden states, without the [rows, vocabulary] intermediate."""

from rlk_ledger_kernels.descriptors import Backend, Operator

OPERATOR = Operator(
    name="linear_logprob",
    package=__name__,
    chain=82,
    op_class="logprob",
    surface=(
        "pack_head",
        "linear_logprob",
        "head_statistics",
        "merge_statistics",
        "normaliser",
        "linear_logprob_backward",
        "head_backward",
    ),
    backends=(
        Backend(
            name="triton",
            bucket="contract_preserving",
            devices=("cuda", "cpu"),
            autograd=("forward", "backward"),
            parallel=("single", "tp"),
            requires=("vocabulary",),
            needs=("triton",),
            enable="pip install triton; on a CPU also set TRITON_INTERPRET=1",
            fallback="torch",
        ),
        Backend(
            name="torch",
            bucket="contract_preserving",
            devices=("cpu", "cuda"),
            autograd=("forward", "backward"),
            parallel=("single", "tp"),
            requires=("vocabulary",),
        ),
        Backend(
            name="reference",
            bucket="reference",
            devices=("cpu", "cuda"),
            dtypes=("float32",),  # it takes any, but keeps the contract's roundings only where they are none
            autograd=("forward", "backward"),
            parallel=("single", "tp"),
            requires=("vocabulary",),
            deterministic=False,
            batch_invariant=False,
            fallback=None,
        ),
    ),
)
