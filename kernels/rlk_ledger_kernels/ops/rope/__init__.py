"""Rotary position embedding: half-rotation or interleaved, whole heads or their first dimensions."""

from rlk_ledger_kernels.descriptors import Backend, Operator
from rlk_ledger_kernels.native_backends import halves, native

OPERATOR = Operator(
    name="rope",
    package=__name__,
    chain=40,
    op_class="elementwise",
    surface=("rope",),
    backends=(
        Backend(
            name="triton",
            bucket="contract_preserving",
            devices=("cuda", "cpu"),
            autograd=("forward", "backward"),
            shapes=(("head_dim", 2, 1024),),
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
        native("vllm", devices=("cuda", "cpu")),
        halves("flashinfer"),
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
