"""Log-probability of one chosen token per row, from logits that exist."""

from rlk_ledger_kernels.descriptors import Backend, Operator
from rlk_ledger_kernels.native_backends import native

OPERATOR = Operator(
    name="selected_logprob",
    package=__name__,
    chain=80,
    op_class="logprob",
    surface=(
        "selected_logprob",
        "selected_logprob_backward",
    ),
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
        native("vllm"),
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
