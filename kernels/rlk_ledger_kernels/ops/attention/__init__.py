"""Causal grouped-query attention over a paged KV cache; prefill, chunks and decode are one operator."""

from rlk_ledger_kernels.descriptors import Backend, Operator
from rlk_ledger_kernels.native_backends import halves

OPERATOR = Operator(
    name="attention",
    package=__name__,
    chain=50,
    op_class="attention",
    surface=("attention", "attention_partials", "merge_partials", "attention_backward"),
    backends=(
        Backend(
            name="triton",
            bucket="contract_preserving",
            devices=("cuda", "cpu"),
            autograd=("forward", "backward"),
            parallel=("single", "tp", "cp"),
            shapes=(("head_dim", 1, 256),),
            needs=("triton",),
            enable="pip install triton; on a CPU also set TRITON_INTERPRET=1",
            fallback="torch",
        ),
        Backend(
            name="torch",
            bucket="contract_preserving",
            devices=("cpu", "cuda"),
            autograd=("forward", "backward"),
            parallel=("single", "tp", "cp"),
            shapes=(("head_dim", 1, 256),),
        ),
        halves("flashinfer"),
        Backend(
            name="reference",
            bucket="reference",
            devices=("cpu", "cuda"),
            dtypes=("float32",),  # it takes any, but keeps the contract's roundings only where they are none
            autograd=("forward", "backward"),
            shapes=(("head_dim", 1, 256),),
            deterministic=False,
            batch_invariant=False,
            fallback=None,
        ),
    ),
)
