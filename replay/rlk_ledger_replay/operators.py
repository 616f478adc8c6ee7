"""The operators a decoder runs: each one bound through one registry session, and exactly what was decided.

A decoder claims bits, so a backend that declares no batch invariance is refused however it is asked for.
"""

from __future__ import annotations

from dataclasses import dataclass

from rlk_ledger_kernels.decision import Decision, Provenance
from rlk_ledger_kernels.descriptors import Parallel
from rlk_ledger_kernels.errors import ContractError
from rlk_ledger_kernels.request import AUTO, Request
from rlk_ledger_kernels.session import Bound, Session
from rlk_ledger_replay.checkpoint import ModelConfig
from rlk_ledger_replay.layout import Layout
from rlk_ledger_replay.numerics import Numerics

DENSE = ("embedding", "rms_norm", "linear", "rope", "attention", "swiglu", "linear_logprob")
SHARED = ("attention", "linear", "linear_logprob", "embedding", "grouped_experts")
"""Operators that ranks share; the others see whole rows under any layout."""
SPARSE = ("moe_router", "grouped_experts")


@dataclass(frozen=True)
class Operators:
    """Bound operators by name, with the case they belong to. The last two are None for a model without experts."""

    embedding: Bound
    rms_norm: Bound
    linear: Bound
    rope: Bound
    attention: Bound
    swiglu: Bound
    linear_logprob: Bound
    moe_router: Bound | None
    grouped_experts: Bound | None
    case: Session

    @property
    def decisions(self) -> tuple[Decision, ...]:
        """Which backend runs each operator, and why."""
        return tuple(one.decision for one in self.case.provenance)

    @property
    def provenance(self) -> tuple[Provenance, ...]:
        """The decisions with what was loaded; `to_event` makes the `operator.decided` event of each."""
        return self.case.provenance

    @property
    def on_blas(self) -> bool:
        """Whether some product runs in torch's own matrix product, whose repeatability has to be probed."""
        products = (self.linear, self.attention, self.rms_norm, self.linear_logprob)
        return any(one.decision.actual == "torch" for one in products)


def bind_operators(config: ModelConfig, numerics: Numerics, layout: Layout, backend: str, device: str) -> Operators:
    """Decide and load every operator of a decoder.

    backend: `auto`, or a name for all operators that have such a backend; the others take the best one there is.
    device: a torch device, as `cpu` or `cuda:0`.
    Raises ContractError for a name no operator has and for one that promises no bits, DecisionError when nothing can
    run.
    """
    case = Session(fast="auto", consistency="strict")
    names = (*DENSE, *SPARSE) if config.experts is not None else DENSE
    declared = {name: {one.name: one for one in case.registry.operator(name).backends} for name in names}
    if backend != AUTO and not any(backend in backends for backends in declared.values()):
        known = sorted({one for backends in declared.values() for one in backends})
        raise ContractError(f"backend {backend!r} of a decoder does not exist; choose {AUTO}, {', '.join(known)}")
    unsure = [name for name, found in declared.items() if backend in found and not found[backend].batch_invariant]
    if unsure:
        raise ContractError(
            f"backend {backend!r} of {unsure[0]} promises no bits, and a decoder claims them; choose {AUTO}, torch or "
            "triton"
        )
    bound = {
        name: case.bind(
            _request(name, backend if backend in declared[name] else AUTO, config, numerics, layout, device)
        )
        for name in names
    }
    return Operators(
        **{name: bound[name] for name in DENSE},
        **{name: bound.get(name) for name in SPARSE},  # type: ignore[arg-type]
        case=case,
    )


def _request(name: str, backend: str, config: ModelConfig, numerics: Numerics, layout: Layout, device: str) -> Request:
    axis: Parallel = "cp" if name == "attention" else "tp"
    size = layout.cp if name == "attention" else layout.tp
    shared = size > 1 and name in SHARED
    return Request(
        operator=name,
        backend=backend,
        device=device.partition(":")[0],
        dtype=numerics.compute,
        autograd="forward",
        parallel=(axis,) if shared else ("single",),
        topology={axis: size} if shared else {},
        shapes=_sizes(config, layout),
        contract_version="1",
        deterministic=True,
        batch_invariant=True,
    )


def _sizes(config: ModelConfig, layout: Layout) -> dict[str, int]:
    sizes = {
        "vocabulary": config.vocabulary,
        "hidden": config.hidden,
        "head_dim": config.head_dim,
        "tp_size": layout.tp,
        "tp_rank": 0,
    }
    if config.experts is not None:
        sizes |= {"experts": config.experts.count, "top_k": config.experts.top_k}
    return sizes
