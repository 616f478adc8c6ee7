"""Root-mean-square normalisation over the last dimension, alone or after a residual is added."""

from rlk_ledger_kernels.descriptors import Backend, Operator
from rlk_ledger_kernels.native_backends import halves, native

OPERATOR = Operator(
    name="rms_norm",
    package=__name__,
    chain=20,
    op_class="reduction",
    surface=("rms_norm", "add_rms_norm"),
    backends=(
        Backend(
            name="triton",
            bucket="contract_preserving",
            devices=("cuda", "cpu"),
            autograd=("forward", "backward"),
            shapes=(("hidden", 1, 32768),),
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
        native("transformer_engine"),
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
