"""The experts of a mixture: each token through its own, combined by rising expert index."""

from rlk_ledger_kernels.descriptors import Backend, Operator

OPERATOR = Operator(
    name="grouped_experts",
    package=__name__,
    chain=66,
    op_class="reduction",
    surface=(
        "pack_experts",
        "grouped_experts",
        "pack_expert_shard",
        "expert_partials",
        "merge_experts",
        "grouped_experts_backward",
    ),
    backends=(
        Backend(
            name="triton",
            bucket="contract_preserving",
            devices=("cuda", "cpu"),
            autograd=("forward", "backward"),
            parallel=("single", "tp", "ep"),
            needs=("triton",),
            enable="pip install triton; on a CPU also set TRITON_INTERPRET=1",
            fallback="torch",
        ),
        Backend(
            name="torch",
            bucket="contract_preserving",
            devices=("cpu", "cuda"),
            autograd=("forward", "backward"),
            parallel=("single", "tp", "ep"),
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
