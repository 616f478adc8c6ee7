"""Claim: gradients of attention are those of float64 autograd, and those of a sequence do not depend on the others."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from attention_model import Sequence3, drawn, packed, plain

from rlk_ledger_kernels.bits import same_bits
from rlk_ledger_kernels.errors import OperandError
from rlk_ledger_kernels.ops.attention import reference
from rlk_ledger_kernels.ops.attention import torch as on_torch
from rlk_ledger_kernels.ops.attention import triton as on_triton
from rlk_ledger_kernels.ops.attention.autograd import PackedAttention, PackedPrefill
from rlk_ledger_kernels.ops.attention.contract import AttentionContract
from rlk_ledger_kernels.ops.attention.plan import Chunk, plan_attention
from rlk_ledger_kernels.schedule import Schedule

MODULES = [on_torch, on_triton, reference]
LENGTHS = (70, 1, 33)
SHAPES = [
    ((4, 2, 16), 64, None, "query"),
    ((8, 1, 16), 32, 20, "score"),
    ((3, 3, 6), 64, 1, "query"),
    ((12, 1, 16), 16, 40, "score"),
]


def cotangents(rows: int, heads: int, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(99)
    return torch.randn((rows, heads, head_dim), generator=g), torch.randn((rows, heads), generator=g)


def gradients(
    module: ModuleType, sequences: list[Sequence3], contract: AttentionContract, grads: tuple[torch.Tensor, ...]
) -> tuple[torch.Tensor, ...]:
    q, k, v = (torch.cat(parts).requires_grad_() for parts in zip(*sequences))
    prefill = PackedPrefill([len(s[0]) for s in sequences], contract)
    out, lse = PackedAttention.apply(module, q, k, v, prefill, contract)
    return torch.autograd.grad((out, lse), (q, k, v), grads)


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__.rsplit(".", 1)[-1])
@pytest.mark.parametrize(("heads", "block", "window", "scale_at"), SHAPES)
def test_gradients_are_those_of_float64_autograd(
    module: ModuleType, heads: tuple[int, int, int], block: int, window: int | None, scale_at: str
) -> None:
    contract = AttentionContract(0.3, schedule=Schedule(kv_block=block), window=window, scale_at=scale_at)  # type: ignore[arg-type]
    sequences = [drawn(i, n, *heads, torch.float32) for i, n in enumerate(LENGTHS)]
    grad, grad_lse = cotangents(sum(LENGTHS), heads[0], heads[2])
    got = gradients(module, sequences, contract, (grad, grad_lse))
    row = 0
    for q, k, v in sequences:
        rows = slice(row, row + len(q))
        row = rows.stop
        leaves = [x.double().requires_grad_() for x in (q, k, v)]
        expected = torch.autograd.grad(
            plain(*leaves, 0.3, window), leaves, (grad[rows].double(), grad_lse[rows].double())
        )
        for ours, theirs in zip(got, expected):
            torch.testing.assert_close(ours[rows].double(), theirs, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize(("module", "dtype"), [(on_torch, "float32"), (on_torch, "bfloat16"), (on_triton, "bfloat16")])
def test_gradients_of_a_sequence_do_not_depend_on_the_others(module: ModuleType, dtype: str) -> None:
    contract = AttentionContract(
        0.3,
        output=dtype,
        schedule=Schedule(kv_block=64),
        window=50,
        scale_at="score",
        weights=dtype,  # type: ignore[arg-type]
    )
    kind = getattr(torch, dtype)
    sequences = [drawn(i, n, 8, 2, 16, kind) for i, n in enumerate(LENGTHS)]
    grad, grad_lse = cotangents(sum(LENGTHS), 8, 16)
    grad = grad.to(kind)
    together = gradients(module, sequences, contract, (grad, grad_lse))
    for index in (1, 2):
        rows = slice(sum(LENGTHS[:index]), sum(LENGTHS[: index + 1]))
        alone = gradients(module, [sequences[index]], contract, (grad[rows], grad_lse[rows]))
        assert all(same_bits(a, b[rows]) for a, b in zip(alone, together))
    poison = tuple(torch.full_like(x, float("nan")) for x in sequences[0])
    beside = gradients(module, [poison, *sequences[1:]], contract, (grad, grad_lse))
    assert all(same_bits(a[LENGTHS[0] :], b[LENGTHS[0] :]) for a, b in zip(beside, together))
    assert all(same_bits(a, b) for a, b in zip(gradients(module, sequences, contract, (grad, grad_lse)), together))


def test_tensor_core_gradients_stay_within_the_tolerance_of_their_dtype() -> None:
    contract = AttentionContract(0.3, output="bfloat16", scale_at="score", weights="bfloat16")
    sequences = [drawn(0, 70, 4, 2, 16, torch.bfloat16)]
    grad, grad_lse = cotangents(70, 4, 16)
    grads = (grad.to(torch.bfloat16), grad_lse)
    exact = gradients(reference, sequences, AttentionContract(0.3), (grads[0].float(), grad_lse))
    for module in (on_torch, on_triton):
        for ours, theirs in zip(gradients(module, sequences, contract, grads), exact):
            torch.testing.assert_close(ours.float(), theirs.float(), atol=6e-2, rtol=4e-2)


def test_a_chunk_that_leaves_keys_behind_has_no_gradient() -> None:
    contract = AttentionContract(0.3)
    q, cache, _ = packed([drawn(0, 40, 2, 2, 8, torch.float32)], contract)
    plan = plan_attention([Chunk(10, 30, [0])], contract.schedule)
    zeros = torch.zeros(30, 2)
    for module in MODULES:
        with pytest.raises(OperandError, match="chunk 0 starts at position 10; the backward pass needs whole"):
            module.attention_backward(q[:30], zeros, q[:30], q[:30], zeros, cache, plan, contract)
    with pytest.raises(OperandError, match="both need the 3 rows of the packed sequences"):
        PackedAttention.apply(on_torch, q, q, q, PackedPrefill([3], contract), contract)
