"""The numeric choices under which a side computed its log-probabilities, each swappable on its own.

The reference is `Numerics()`: float32 everywhere on the recorded weights. Imitating a side means replacing
fields; a noise floor replaces `schedule` and nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from rlk_ledger_kernels.dtypes import DType, one_of, torch_dtype
from rlk_ledger_kernels.errors import ContractError
from rlk_ledger_kernels.ops.attention.contract import AttentionContract
from rlk_ledger_kernels.ops.grouped_experts.contract import GroupedExpertsContract
from rlk_ledger_kernels.ops.linear.contract import LinearContract
from rlk_ledger_kernels.ops.moe_router.contract import MoeRouterContract
from rlk_ledger_kernels.ops.rms_norm.contract import RmsNormContract, RoundingOrder
from rlk_ledger_kernels.ops.rope.contract import RopeContract
from rlk_ledger_kernels.ops.rope.table import RopeTable, attention_factor, frequencies, rope_table
from rlk_ledger_kernels.ops.selected_logprob.contract import LogprobContract
from rlk_ledger_kernels.ops.swiglu.contract import SwigluContract
from rlk_ledger_kernels.schedule import Schedule
from rlk_ledger_replay.checkpoint import ModelConfig
from rlk_ledger_replay.departures import AttentionMerge


@dataclass(frozen=True)
class Leaves:
    """Longest leaf of the projections, of the norms' square sums, and of the head with its log-sum-exp."""

    linear: int
    norm: int
    head: int


FLOAT32_LEAVES = Leaves(linear=64, norm=16, head=32)
"""No leaf of a float32 decoder is longer: with leaves of 128 throughout it was half as far again from a float64 model.
A norm scales a whole row and a logit is part of the result, so these two are worth the most. In narrower dtypes the
rounding to them outweighs the order of a sum by far, and long leaves are faster."""


@dataclass(frozen=True)
class Numerics:
    """How a decoder rounds. Fields that are None follow `compute` (`logits` follows `lm_head`).

    compute: dtype of weights, activations and the residual stream; sums are float32 whatever it is.
    lm_head: dtype the last hidden state and the head's weight are rounded to. logits: dtype of their product.
    kv_cache: dtype keys and values are rounded to when stored. rope_table: dtype of cosines and sines.
    rms_norm: `hf` rounds before multiplying by the weight, `kernel` after.
    swiglu: `activation` rounds silu(gate) before the product, `product` only after it.
    router: dtype of a router's logits; its softmax and weights are float32 until the weights are rounded to `compute`.
    temperature, logprob_mode: `processed` scores softmax(logits / temperature), `raw` ignores temperature.
    residual: dtype of the residual stream. rope_arithmetic: dtype the rotation's products are rounded to.
    softmax: dtype attention's weights are rounded to before they multiply the values; None is float32.
    attention_merge, lse_state, reduce_ranks, reduce_dtype: roundings of engines that cut attention, the vocabulary or
        row-parallel products into parts, see `departures`; reduce_ranks 1 cuts nothing.
    schedule: the order of every sum; in float32 some leaves are shorter, see `leaves`.
    """

    compute: DType = "float32"
    lm_head: DType | None = None
    logits: DType | None = None
    kv_cache: DType | None = None
    rope_table: DType | None = None
    rms_norm: RoundingOrder = "hf"
    swiglu: Literal["activation", "product"] = "activation"
    router: DType | None = None
    residual: DType | None = None
    rope_arithmetic: DType | None = None
    softmax: DType | None = None
    attention_merge: AttentionMerge | None = None
    lse_state: DType | None = None
    reduce_ranks: int = 1
    reduce_dtype: DType | None = None
    temperature: float = 1.0
    logprob_mode: Literal["raw", "processed"] = "processed"
    schedule: Schedule = field(default_factory=Schedule)

    def leaves(self) -> Leaves:
        """The longest leaf of each kind of contraction: the schedule's, in float32 at most FLOAT32_LEAVES."""
        k_leaf = self.schedule.k_leaf
        if self.compute != "float32":
            return Leaves(k_leaf, k_leaf, k_leaf)
        most = FLOAT32_LEAVES
        return Leaves(min(k_leaf, most.linear), min(k_leaf, most.norm), min(k_leaf, most.head))

    def _with_leaf(self, k_leaf: int) -> Schedule:
        return replace(self.schedule, k_leaf=k_leaf)

    def __post_init__(self) -> None:
        """Refuse unknown names (ContractError) by building every contract once."""
        one_of("numerics.logprob_mode", self.logprob_mode, ("raw", "processed"))
        if not isinstance(self.schedule, Schedule):
            raise ContractError(f"numerics.schedule is {self.schedule!r}; pass a Schedule")
        if self.attention_merge is not None:
            one_of("numerics.attention_merge", self.attention_merge, ("state", "output"))
        for dtype in (self.kv_cache, self.residual, self.lse_state, self.reduce_dtype):
            torch_dtype(dtype or self.compute)
        if self.reduce_ranks < 1 or (self.reduce_ranks > 1) != (self.reduce_dtype is not None):
            raise ContractError(
                f"numerics.reduce_ranks is {self.reduce_ranks}, reduce_dtype {self.reduce_dtype!r}; give both or none"
            )
        self.attention_contract(64)
        self.router_logits_contract()
        self.linear_contract()
        self.rms_norm_contract(1e-6)
        self.rope_contract()
        self.swiglu_contract()
        self.logprob_contract()

    def linear_contract(self) -> LinearContract:
        """The projections of every layer."""
        schedule = self._with_leaf(self.leaves().linear)
        return LinearContract(output=self.compute, operands=self.compute, schedule=schedule)

    def rms_norm_contract(self, eps: float) -> RmsNormContract:
        """All norms, qk-norm included."""
        return RmsNormContract(
            eps=eps,
            rounding_order=self.rms_norm,
            output=self.compute,
            schedule=self._with_leaf(self.leaves().norm),
        )

    def rope_contract(self) -> RopeContract:
        """The rotation of queries and keys."""
        arithmetic = self.rope_arithmetic or self.compute
        return RopeContract(table=self.rope_table or self.compute, arithmetic=arithmetic, output=self.compute)

    def rotation_table(self, config: ModelConfig, device: str) -> RopeTable:
        """The cosines and sines of a model's positions.

        No sequence is longer than they are, so `dynamic` scaling, which follows the longest one, never stretches them.
        """
        angles_F = frequencies(config.head_dim, config.rope_theta, config.rope_scaling)
        factor = attention_factor(config.rope_scaling)
        return rope_table(angles_F, config.positions, self.rope_contract(), factor).to(device)

    def attention_contract(self, head_dim: int, window: int | None = None) -> AttentionContract:
        """Attention with the usual scale."""
        return AttentionContract(
            scale=head_dim**-0.5,
            output=self.compute,
            schedule=self.schedule,
            window=window,
            weights=self.softmax or "float32",
        )

    def swiglu_contract(self) -> SwigluContract:
        """The gated activation."""
        return SwigluContract(output=self.compute, materialise=self.swiglu)

    def router_logits_contract(self) -> LinearContract:
        """The product that gives a router's logits."""
        return replace(self.linear_contract(), output=self.router or self.compute)

    def router_contract(self, top_k: int, renormalise: bool) -> MoeRouterContract:
        """The choice of experts and their weights. renormalise: whether the weights of the chosen ones sum to one."""
        return MoeRouterContract(
            top_k=top_k,
            weighting="softmax_renormalised" if renormalise else "softmax",
            output=self.compute,
            schedule=self.schedule,
        )

    def experts_contract(self) -> GroupedExpertsContract:
        """The experts of a mixture."""
        return GroupedExpertsContract(
            output=self.compute,
            operands=self.compute,
            materialise=self.swiglu,
            schedule=self._with_leaf(self.leaves().linear),
        )

    def logprob_contract(self) -> LogprobContract:
        """Head, logits and the selected log-probability."""
        head = self.lm_head or self.compute
        temperature = self.temperature if self.logprob_mode == "processed" else 1.0
        LogprobContract(temperature=self.temperature)  # refuses a bad one in raw mode as well
        schedule = self._with_leaf(self.leaves().head)
        return LogprobContract(temperature=temperature, logits=self.logits or head, head=head, schedule=schedule)

    def spelled_out(self) -> Numerics:
        """The same numerics with every default written out, so that equal ones compare equal."""
        head = self.lm_head or self.compute
        raw = self.logprob_mode == "raw"
        return replace(
            self,
            lm_head=head,
            logits=self.logits or head,
            kv_cache=self.kv_cache or self.compute,
            rope_table=self.rope_table or self.compute,
            router=self.router or self.compute,
            residual=self.residual or self.compute,
            rope_arithmetic=self.rope_arithmetic or self.compute,
            softmax=self.softmax or "float32",
            temperature=1.0 if raw else self.temperature,
            logprob_mode="processed",
        )
