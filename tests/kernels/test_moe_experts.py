"""Experts: bits independent of who shares an expert, of tensor and of expert parallelism; gradients in order."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch

from rlk_ledger_kernels.bits import same_bits
from rlk_ledger_kernels.errors import ContractError, OperandError
from rlk_ledger_kernels.ops.grouped_experts import reference
from rlk_ledger_kernels.ops.grouped_experts import torch as experts_torch
from rlk_ledger_kernels.ops.grouped_experts import triton as experts_triton
from rlk_ledger_kernels.ops.grouped_experts.contract import GroupedExpertsContract
from rlk_ledger_kernels.schedule import Schedule

every_backend = pytest.mark.parametrize("backend", [experts_torch, experts_triton], ids=["torch", "triton"])
E, INNER, H, T = 8, 48, 40, 3
NARROW = Schedule(k_leaf=8)  # eight leaves over the inner width, so that eight ranks are nodes of its tree
HALVED = Schedule(k_leaf=32)  # two leaves: enough for two ranks, and quick in the interpreter
Operands = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def operands(rows: int, dtype: torch.dtype = torch.float32, used: int = E, seed: int = 0) -> Operands:
    """(x, gate, up, down, weights, experts); only experts 1 .. used - 1 are routed to."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    x, gate, up = draw(rows, H), draw(E, INNER, H) / H**0.5, draw(E, INNER, H) / H**0.5
    down, weights = draw(E, H, INNER) / INNER**0.5, draw(rows, T).softmax(1)
    experts = torch.stack([torch.randperm(used - 1, generator=generator)[:T] + 1 for _ in range(rows)])
    return x.to(dtype), gate.to(dtype), up.to(dtype), down.to(dtype), weights.to(dtype), experts


def slow(x, gate, up, down, weights, experts):  # type: ignore[no-untyped-def]
    """The equation in float64, one token and one expert at a time."""
    x, gate, up, down, weights = (tensor.double() for tensor in (x, gate, up, down, weights))
    rows = []
    for n in range(x.shape[0]):
        total = torch.zeros(x.shape[1], dtype=torch.float64)
        for t in range(experts.shape[1]):
            e = int(experts[n, t])
            total = total + weights[n, t] * (down[e] @ (torch.nn.functional.silu(gate[e] @ x[n]) * (up[e] @ x[n])))
        rows.append(total)
    return torch.stack(rows)


@pytest.mark.parametrize(
    ("backend", "dtype", "weighted", "combine"),
    [
        (experts_torch, "float32", "float32", "float32"),
        (experts_torch, "bfloat16", "hf", "float32"),
        (experts_torch, "bfloat16", "kernel", "output"),
        (experts_triton, "float32", "hf", "float32"),
        (experts_triton, "bfloat16", "kernel", "output"),
    ],
)
def test_experts_are_the_equation(backend: ModuleType, dtype: str, weighted: str, combine: str) -> None:
    contract = GroupedExpertsContract(output=dtype, weighted=weighted, combine=combine)  # type: ignore[arg-type]
    x, gate, up, down, weights, experts = operands(21, getattr(torch, dtype))
    got = backend.grouped_experts(x, backend.pack_experts(gate, up, down, contract), weights, experts)
    assert got.dtype == getattr(torch, dtype)
    tolerance = {"atol": 5e-2, "rtol": 2e-2} if dtype == "bfloat16" else {"atol": 1e-5, "rtol": 1e-5}
    torch.testing.assert_close(got.double(), slow(x, gate, up, down, weights, experts), **tolerance)
    plain = reference.grouped_experts(x, reference.pack_experts(gate, up, down, contract), weights, experts)
    torch.testing.assert_close(plain.double(), slow(x, gate, up, down, weights, experts), atol=1e-5, rtol=1e-5)


def test_the_roundings_are_those_of_hugging_face() -> None:
    """Same operands through transformers' experts, whose products are float32 here: bitwise up to their own sums."""
    qwen3_moe = pytest.importorskip("transformers.models.qwen3_moe.modeling_qwen3_moe")
    config = qwen3_moe.Qwen3MoeConfig(
        hidden_size=H, moe_intermediate_size=INNER, num_experts=E, num_experts_per_tok=T, hidden_act="silu"
    )
    config._experts_implementation = "grouped_mm"
    theirs = qwen3_moe.Qwen3MoeExperts(config)
    x, gate, up, down, weights, experts = operands(64, torch.bfloat16)
    theirs.gate_up_proj.data, theirs.down_proj.data = torch.cat((gate, up), dim=1), down
    with torch.no_grad():
        expected = theirs(x, experts, weights)
    shares = {}
    for weighted in ("hf", "kernel", "float32"):
        contract = GroupedExpertsContract(output="bfloat16", weighted=weighted)  # type: ignore[arg-type]
        got = experts_torch.grouped_experts(x, experts_torch.pack_experts(gate, up, down, contract), weights, experts)
        shares[weighted] = float((got == expected).float().mean())
    assert shares["hf"] > 0.97, shares
    assert shares["hf"] > max(shares["kernel"], shares["float32"]) + 0.2, shares


@pytest.mark.parametrize(
    ("backend", "dtype"), [(experts_torch, "float32"), (experts_torch, "bfloat16"), (experts_triton, "bfloat16")]
)
def test_who_else_goes_to_an_expert_changes_no_bit(backend: ModuleType, dtype: str) -> None:
    contract = GroupedExpertsContract(output=dtype)  # type: ignore[arg-type]
    x, gate, up, down, weights, experts = operands(70, getattr(torch, dtype))
    packed = backend.pack_experts(gate, up, down, contract)
    whole = backend.grouped_experts(x, packed, weights, experts)
    for rows in ([69], [3, 2, 1], list(range(69, -1, -1))):
        part = backend.grouped_experts(x[rows], packed, weights[rows], experts[rows])
        assert same_bits(part, whole[rows])
    crowded = torch.full_like(experts, 5)
    crowded[:, 0], crowded[:, 1] = 2, 4
    crowded[7], crowded[33] = experts[7], experts[33]
    noisy = torch.full_like(x, float("nan"))
    noisy[7], noisy[33] = x[7], x[33]
    moved = backend.grouped_experts(noisy, packed, weights, crowded)
    assert same_bits(moved[[7, 33]], whole[[7, 33]])
    shuffled = torch.tensor([2, 0, 1])
    columns = backend.grouped_experts(x, packed, weights[:, shuffled], experts[:, shuffled])
    assert same_bits(columns, whole), "experts are combined by index, whatever their column"


def test_a_combination_in_column_order_is_caught() -> None:
    contract = GroupedExpertsContract()
    x, gate, up, down, weights, experts = operands(70)
    packed = experts_torch.pack_experts(gate, up, down, contract)
    parts = experts_torch.expert_partials(x, packed, experts) * weights[:, :, None]
    in_columns = (parts[:, 0] + parts[:, 1]) + parts[:, 2]
    assert not same_bits(in_columns, experts_torch.grouped_experts(x, packed, weights, experts))


@pytest.mark.parametrize(
    ("backend", "tp", "ep"),
    [
        *[(experts_torch, tp, ep) for tp, ep in ((1, 1), (2, 1), (4, 1), (8, 1), (1, 2), (1, 8), (2, 4))],
        (experts_triton, 2, 2),
    ],
)
def test_shares_of_ranks_merge_to_the_bits_of_one(backend: ModuleType, tp: int, ep: int) -> None:
    contract = GroupedExpertsContract(output="bfloat16", schedule=NARROW if backend is experts_torch else HALVED)
    x, gate, up, down, weights, experts = operands(19, torch.bfloat16)
    whole = backend.grouped_experts(x, backend.pack_experts(gate, up, down, contract), weights, experts)
    parts = [
        backend.expert_partials(x, backend.pack_expert_shard(gate, up, down, contract, (tp, t), (ep, e)), experts)
        for e in range(ep)
        for t in range(tp)
    ]
    assert same_bits(backend.merge_experts(parts, weights, experts, contract, E, tp, ep), whole)
    plain = [
        reference.expert_partials(x, reference.pack_expert_shard(gate, up, down, contract, (tp, t), (ep, e)), experts)
        for e in range(ep)
        for t in range(tp)
    ]
    merged = reference.merge_experts(plain, weights, experts, contract, E, tp, ep)
    torch.testing.assert_close(merged.double(), slow(x, gate, up, down, weights, experts), atol=1e-4, rtol=1e-4)


@every_backend
def test_experts_without_tokens_and_no_tokens_at_all(backend: ModuleType) -> None:
    contract = GroupedExpertsContract()
    x, gate, up, down, weights, experts = operands(9, used=4)  # experts 0 and 4..7 get nothing
    packed = backend.pack_experts(gate, up, down, contract)
    got = backend.grouped_experts(x, packed, weights, experts)
    torch.testing.assert_close(got.double(), slow(x, gate, up, down, weights, experts), atol=1e-5, rtol=1e-5)
    assert backend.grouped_experts(x[:0], packed, weights[:0], experts[:0]).shape == (0, H)


@every_backend
def test_gradients_are_those_of_float64_autograd(backend: ModuleType) -> None:
    contract = GroupedExpertsContract(schedule=NARROW if backend is experts_torch else HALVED)
    x, gate, up, down, weights, experts = operands(37, used=5)
    grad = torch.randn(x.shape, generator=torch.Generator().manual_seed(9))
    leaves = [tensor.double().requires_grad_() for tensor in (x, weights, gate, up, down)]
    slow(leaves[0], leaves[2], leaves[3], leaves[4], leaves[1], experts).backward(grad.double())
    for module in (backend, reference):
        packed = module.pack_experts(gate, up, down, contract)
        grads = module.grouped_experts_backward(grad, x, packed, weights, experts)
        for name, got, leaf in zip(("x", "weights", "gate", "up", "down"), grads, leaves, strict=True):
            torch.testing.assert_close(got.double(), leaf.grad, atol=2e-5, rtol=2e-5, msg=lambda m, n=name: f"{n}: {m}")
    packed = backend.pack_experts(gate, up, down, contract)
    grad_x, grad_weights, *_ = backend.grouped_experts_backward(grad, x, packed, weights, experts)
    rows = [36, 4, 11]
    alone = backend.grouped_experts_backward(grad[rows], x[rows], packed, weights[rows], experts[rows])
    assert same_bits(alone[0], grad_x[rows])
    assert same_bits(alone[1], grad_weights[rows])


@every_backend
def test_experts_refuse_by_name(backend: ModuleType) -> None:
    contract = GroupedExpertsContract()
    x, gate, up, down, weights, experts = operands(4)
    with pytest.raises(OperandError, match="do not belong together"):
        backend.pack_experts(gate, up, down.transpose(1, 2), contract)
    with pytest.raises(ContractError, match="8 experts give no equal run to rank 0 of 3"):
        backend.pack_expert_shard(gate, up, down, contract, ep=(3, 0))
    with pytest.raises(ContractError, match="straddle the boundaries of 2 shards"):
        backend.pack_expert_shard(gate, up, down, contract, tp=(2, 0))
    packed = backend.pack_experts(gate, up, down, contract)
    with pytest.raises(OperandError, match=r"an expert outside 0..7"):
        backend.grouped_experts(x, packed, weights, experts + E)
    with pytest.raises(OperandError, match=r"weights are \(4, 2\), experts \(4, 3\)"):
        backend.grouped_experts(x, packed, weights[:, :2], experts)
    with pytest.raises(OperandError, match=r"the experts need \[rows, 40\]"):
        backend.grouped_experts(x[:, :-1], packed, weights, experts)
    share = backend.pack_expert_shard(gate, up, down, contract, ep=(2, 0))
    with pytest.raises(OperandError, match="use expert_partials and merge_experts"):
        backend.grouped_experts(x, share, weights, experts)
    with pytest.raises(OperandError, match="1 shares for tp 1 x ep 2"):
        backend.merge_experts([torch.zeros(4, T, H)], weights, experts, contract, E, ep=2)
    with pytest.raises(ContractError, match=r"grouped_experts\.weighted is 'both'"):
        GroupedExpertsContract(weighted="both")  # type: ignore[arg-type]
