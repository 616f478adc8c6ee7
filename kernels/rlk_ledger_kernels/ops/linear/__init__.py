"""Matrix product with a weight stored as [out, in]: whole, column parallel, or row parallel with a declared merge."""

from rlk_ledger_kernels.descriptors import Backend, Operator
from rlk_ledger_kernels.native_backends import native

OPERATOR = Operator(
    name="linear",
    package=__name__,
    chain=30,
    op_class="reduction",
    surface=("pack_linear", "linear", "pack_row_shard", "linear_partial", "merge_partials", "linear_backward"),
    backends=(
        Backend(
            name="triton",
            bucket="contract_preserving",
            devices=("cuda", "cpu"),
            autograd=("forward", "backward"),
            parallel=("single", "tp"),
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
        ),
        native("vllm"),
        native("transformer_engine"),
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
