"""The router chooses by logit with a declared tie-break; its weights follow the set of experts and nothing else."""

from __future__ import annotations

from itertools import product
from types import ModuleType

import pytest
import torch

from rlk_ledger_kernels.bits import same_bits
from rlk_ledger_kernels.errors import ContractError, OperandError
from rlk_ledger_kernels.ops.moe_router import reference
from rlk_ledger_kernels.ops.moe_router import torch as router_torch
from rlk_ledger_kernels.ops.moe_router import triton as router_triton
from rlk_ledger_kernels.ops.moe_router.contract import MoeRouterContract, Weighting

every_backend = pytest.mark.parametrize("backend", [router_torch, router_triton], ids=["torch", "triton"])
WEIGHTINGS: tuple[Weighting, ...] = ("softmax", "softmax_renormalised", "softmax_of_top_k")
INF, NAN = float("inf"), float("nan")


def logits(rows: int, experts: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return (torch.randn((rows, experts), generator=torch.Generator().manual_seed(seed)) * 3).to(dtype)


def slow_route(row: list[float], top_k: int) -> list[int]:
    return sorted(range(len(row)), key=lambda e: (-row[e], e))[:top_k]


@every_backend
@pytest.mark.parametrize(("weighting", "experts", "top_k"), list(product(WEIGHTINGS, (5, 128), (1, 4))))
def test_weights_are_the_float64_softmax_of_the_chosen(
    backend: ModuleType, weighting: Weighting, experts: int, top_k: int
) -> None:
    contract = MoeRouterContract(top_k=top_k, weighting=weighting)
    x = logits(33, experts, torch.bfloat16)
    weights, chosen = backend.moe_router(x, contract)
    assert chosen.tolist() == [slow_route(row, top_k) for row in x.tolist()]
    assert torch.equal(chosen, router_torch.moe_router(x, contract)[1]), "backends choose the same experts"
    wide = x.double()
    expected = (
        wide.gather(1, chosen).softmax(1) if weighting == "softmax_of_top_k" else wide.softmax(1).gather(1, chosen)
    )
    if weighting == "softmax_renormalised":
        expected = expected / expected.sum(1, keepdim=True)
    torch.testing.assert_close(weights.double(), expected, atol=1e-6, rtol=1e-5)
    plain_weights, plain_chosen = reference.moe_router(x, contract)
    assert torch.equal(plain_chosen, chosen)
    torch.testing.assert_close(plain_weights.double(), expected, atol=1e-6, rtol=1e-5)


def test_ties_go_to_the_lowest_expert_and_zeros_of_either_sign_tie() -> None:
    contract = MoeRouterContract(top_k=3)
    x = torch.tensor([[1.0, 2.0, 2.0, 2.0, 2.0], [-0.0, 0.0, -0.0, 0.0, -1.0], [5.0, 5.0, 5.0, 5.0, 5.0]])
    for module in (router_torch, router_triton, reference):
        _, chosen = module.moe_router(x, contract)
        assert chosen.tolist() == [[1, 2, 3], [0, 1, 2], [0, 1, 2]]


@every_backend
@pytest.mark.parametrize("weighting", WEIGHTINGS)
def test_what_is_no_number_has_a_defined_route_and_a_nan_weight_in_its_own_row_only(
    backend: ModuleType, weighting: Weighting
) -> None:
    contract = MoeRouterContract(top_k=2, weighting=weighting)
    plain = logits(1, 4)[0].tolist()
    x = torch.tensor(
        [plain, [NAN, 1.0, 3.0, 2.0], [NAN] * 4, [INF, 1.0, 3.0, 2.0], [-INF] * 4, [-INF, -INF, 1.0, -INF]]
    )
    weights, chosen = backend.moe_router(x, contract)
    assert chosen[1:].tolist() == [[2, 3], [0, 1], [0, 2], [0, 1], [2, 0]]
    assert weights[1:5].isnan().all()
    assert weights[5].tolist() == [1.0, 0.0]
    alone, _ = backend.moe_router(x[:1], contract)
    assert same_bits(weights[:1], alone), "a row of NaN beside it changes nothing"
    assert not alone.isnan().any()


@every_backend
def test_router_precision_rounds_logits_and_weights(backend: ModuleType) -> None:
    x = torch.tensor([[1.0, 1.001, 0.5, -2.0]])  # equal in bfloat16: the tie goes to expert 0
    fine_weights, fine = backend.moe_router(x, MoeRouterContract(top_k=2))
    coarse_weights, coarse = backend.moe_router(x, MoeRouterContract(top_k=2, router_precision="bfloat16"))
    assert (fine.tolist(), coarse.tolist()) == ([[1, 0]], [[0, 1]])
    assert same_bits(coarse_weights, coarse_weights.bfloat16().float())
    assert not same_bits(fine_weights, fine_weights.bfloat16().float())
    assert backend.moe_router(x, MoeRouterContract(top_k=2, output="bfloat16"))[0].dtype == torch.bfloat16


@every_backend
@pytest.mark.parametrize("weighting", WEIGHTINGS)
def test_replayed_routes_give_the_live_bits_in_any_order_of_columns(backend: ModuleType, weighting: Weighting) -> None:
    contract = MoeRouterContract(top_k=8, weighting=weighting)
    x = logits(40, 128)
    weights, chosen = backend.moe_router(x, contract)
    assert same_bits(backend.routed_weights(x, chosen, contract), weights)
    order = torch.randperm(8, generator=torch.Generator().manual_seed(1))
    assert same_bits(backend.routed_weights(x, chosen[:, order], contract), weights[:, order])
    forced = (chosen + 1) % 128
    torch.testing.assert_close(
        backend.routed_weights(x, forced, contract), reference.routed_weights(x, forced, contract)
    )


@every_backend
@pytest.mark.parametrize("weighting", WEIGHTINGS)
def test_gradients_are_those_of_float64_autograd_and_row_local(backend: ModuleType, weighting: Weighting) -> None:
    contract = MoeRouterContract(top_k=3, weighting=weighting)
    x, grad = logits(20, 11), logits(20, 3, seed=5)
    _, chosen = backend.moe_router(x, contract)
    wide = x.double().requires_grad_()
    weights = (
        wide.gather(1, chosen).softmax(1) if weighting == "softmax_of_top_k" else wide.softmax(1).gather(1, chosen)
    )
    if weighting == "softmax_renormalised":
        weights = weights / weights.sum(1, keepdim=True)
    weights.backward(grad.double())
    assert wide.grad is not None
    for module in (backend, reference):
        got = module.moe_router_backward(grad, x, chosen, contract)
        torch.testing.assert_close(got.double(), wide.grad, atol=1e-6, rtol=1e-4)
    whole = backend.moe_router_backward(grad, x, chosen, contract)
    for row in (0, 7, 19):
        alone = backend.moe_router_backward(grad[row : row + 1], x[row : row + 1], chosen[row : row + 1], contract)
        assert same_bits(alone, whole[row : row + 1])


@every_backend
def test_a_row_is_routed_by_itself_alone(backend: ModuleType) -> None:
    contract = MoeRouterContract(top_k=4, output="bfloat16")
    x = logits(140, 60, torch.bfloat16)
    weights, chosen = backend.moe_router(x, contract)
    for rows in ([0], [139], [70, 3], list(range(139, -1, -2))):
        some_weights, some_chosen = backend.moe_router(x[rows], contract)
        assert torch.equal(some_chosen, chosen[rows])
        assert same_bits(some_weights, weights[rows])


@every_backend
def test_the_router_refuses_by_name(backend: ModuleType) -> None:
    contract = MoeRouterContract(top_k=2)
    x = logits(3, 4)
    with pytest.raises(ContractError, match=r"moe_router\.top_k is 0"):
        MoeRouterContract(top_k=0)
    with pytest.raises(ContractError, match=r"moe_router\.weighting is 'sigmoid'"):
        MoeRouterContract(top_k=1, weighting="sigmoid")  # type: ignore[arg-type]
    with pytest.raises(OperandError, match="top 2 needs floats"):
        backend.moe_router(x[:, :1], contract)
    with pytest.raises(OperandError, match=r"an expert outside 0..3"):
        backend.routed_weights(x, torch.tensor([[0, 4]] * 3), contract)
    with pytest.raises(OperandError, match="one expert twice"):
        backend.routed_weights(x, torch.tensor([[2, 2]] * 3), contract)
    with pytest.raises(OperandError, match=r"pass int64 \[3, 2\]"):
        backend.routed_weights(x, torch.zeros(3, 1, dtype=torch.int64), contract)
    empty, routes = backend.moe_router(x[:0], contract)
    assert empty.shape == routes.shape == (0, 2)
