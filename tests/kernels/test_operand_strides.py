"""Kernels read operands where they lie: a slice, a column-major matrix or a broadcast gradient gives the same bits."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from rlk_ledger_kernels.bits import same_bits
from rlk_ledger_kernels.ops.grouped_experts import triton as experts
from rlk_ledger_kernels.ops.grouped_experts.contract import GroupedExpertsContract
from rlk_ledger_kernels.ops.linear import triton as linear
from rlk_ledger_kernels.ops.linear.contract import LinearContract
from rlk_ledger_kernels.ops.linear_logprob import triton as head
from rlk_ledger_kernels.ops.moe_router import triton as router
from rlk_ledger_kernels.ops.moe_router.contract import MoeRouterContract
from rlk_ledger_kernels.ops.rms_norm import triton as norm
from rlk_ledger_kernels.ops.rms_norm.contract import RmsNormContract
from rlk_ledger_kernels.ops.rope import triton as rope
from rlk_ledger_kernels.ops.rope.contract import RopeContract
from rlk_ledger_kernels.ops.rope.table import RopeTable
from rlk_ledger_kernels.ops.selected_logprob import triton as logprob
from rlk_ledger_kernels.ops.selected_logprob.contract import LogprobContract
from rlk_ledger_kernels.ops.swiglu import triton as swiglu
from rlk_ledger_kernels.ops.swiglu.contract import SwigluContract
from rlk_ledger_kernels.ops.vocab_parallel_logprob import triton as shard
from rlk_ledger_kernels.schedule import Schedule

Run = Callable[..., object]
N, K, V, T = 5, 24, 40, 2
SCHEDULE = Schedule(k_leaf=16, vocab_tile=16)
LINEAR, ROUTER = LinearContract(schedule=SCHEDULE), MoeRouterContract(top_k=T, schedule=SCHEDULE)
EXPERTS, LOGPROB = GroupedExpertsContract(schedule=SCHEDULE), LogprobContract(ignore_index=-100, schedule=SCHEDULE)
NORM, ROPE, SWIGLU = RmsNormContract(eps=1e-6), RopeContract(), SwigluContract()


def _draw(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


TOKENS = torch.tensor([0, V - 1, -100, 5, 17])
CHOSEN = _draw(N, 4).argsort(1)[:, :T]
WEIGHTS = _draw(4, 16, K), _draw(4, 16, K), _draw(4, K, 16)
POSITIVE = _draw(N).exp()

OPERATORS: dict[str, tuple[Run, tuple[torch.Tensor, ...]]] = {
    "linear": (
        lambda x, w, b: linear.linear(x, linear.pack_linear(w, LINEAR, b)),
        (_draw(N, K), _draw(7, K), _draw(7)),
    ),
    "linear gradient": (
        lambda g, x, w: linear.linear_backward(g, x, linear.pack_linear(w, LINEAR)),
        (_draw(N, 7), _draw(N, K), _draw(7, K)),
    ),
    "experts": (
        lambda x, a, u, d, w, e: experts.grouped_experts(x, experts.pack_experts(a, u, d, EXPERTS), w, e),
        (_draw(N, K), *WEIGHTS, _draw(N, T), CHOSEN),
    ),
    "merged experts": (
        lambda part, w, e: experts.merge_experts([part], w, e, EXPERTS, 4),
        (_draw(N, T, K), _draw(N, T), CHOSEN),
    ),
    "routed weights": (lambda z, e: router.routed_weights(z, e, ROUTER), (_draw(N, 4), CHOSEN)),
    "router gradient": (
        lambda g, z, e: router.moe_router_backward(g, z, e, ROUTER),
        (_draw(N, T), _draw(N, 4), CHOSEN),
    ),
    "norm after a residual": (lambda x, r, w: norm.add_rms_norm(x, r, w, NORM), (_draw(N, K), _draw(N, K), _draw(K))),
    "norm gradient": (
        lambda g, x, w: norm.rms_norm_backward(g, x, w, NORM),
        (_draw(N, K), _draw(N, K), _draw(K)),
    ),
    "rope": (lambda x, c, s: rope.rope(x, RopeTable(c, s), ROPE), (_draw(N, 2, K), _draw(N, K), _draw(N, K))),
    "swiglu gradient": (
        lambda g, a, u: swiglu.swiglu_backward(g, a, u, SWIGLU),
        (_draw(N, K), _draw(N, K), _draw(N, K)),
    ),
    "logprob gradient": (
        lambda g, z, t: logprob.selected_logprob_backward(g, z, t, LOGPROB),
        (_draw(N), _draw(N, V), TOKENS),
    ),
    "gradient of a shard": (
        lambda g, z, t, top, total: shard.shard_backward(g, z, 16, V, t, (top, total), LOGPROB),
        (_draw(N), _draw(N, V - 16), TOKENS, _draw(N), POSITIVE),
    ),
    "head": (lambda h, w, t: head.linear_logprob(h, head.pack_head(w, LOGPROB), t), (_draw(N, K), _draw(V, K), TOKENS)),
    "gradient of a shard of a head": (
        lambda g, h, w, t, top, total, carry: head.head_backward(
            g, h, head.pack_head(w, LOGPROB, 16, V), t, (top, total), carry
        ),
        (_draw(N), _draw(N, K), _draw(V - 16, K), TOKENS, _draw(N), POSITIVE, _draw(N, K)),
    ),
}


def _every_second(x: torch.Tensor) -> torch.Tensor:
    wide = x.new_full((*x.shape, 2), 3)
    wide[..., 0] = x
    return wide[..., 0]


def _column_major(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(0, -1).contiguous().transpose(0, -1)


def _tensors(result: object) -> list[torch.Tensor]:
    found = result if isinstance(result, tuple) else (result,)
    return [one for one in found if isinstance(one, torch.Tensor)]


@pytest.mark.parametrize("name", OPERATORS)
def test_a_triton_kernel_reads_any_operand_by_its_strides(name: str) -> None:
    run, operands = OPERATORS[name]
    expected = _tensors(run(*operands))
    for at, operand in enumerate(operands):
        for laid in (_every_second, _column_major):
            given = (*operands[:at], laid(operand), *operands[at + 1 :])
            for got, wanted in zip(_tensors(run(*given)), expected, strict=True):
                assert same_bits(got, wanted), f"operand {at}, {laid.__name__}"


@pytest.mark.parametrize("name", [name for name in OPERATORS if "gradient" in name])
def test_a_broadcast_gradient_is_read_as_what_it_stands_for(name: str) -> None:
    run, (grad, *rest) = OPERATORS[name]
    one = grad.new_ones(()).expand(grad.shape)
    for got, wanted in zip(_tensors(run(one, *rest)), _tensors(run(one.contiguous(), *rest)), strict=True):
        assert same_bits(got, wanted)
