"""A linear-logp provider of vime's shape: vime owns layout, masks and loss; this owns the number and its provenance.

    --linear-logp-provider rlk_ledger_kernels.providers.linear_logp.provider --linear-logp-provider-mode strict

or, in one's own loop:

    result = LinearLogp(fast="auto", consistency="strict")(request)
    loss = -result.logp[:, 0].mean()      # result.provenance["decision"] says which backend ran, and why

Any object with the fields of `Request` will do; its field names are those of vime's provider boundary
(vllm-project/vime, pull requests 423 and 424). Given `context` and a temperature, log-probabilities come from hidden
states and the head's weight, otherwise from the local logits. Nothing is guessed: what is missing is refused with a
reason code. Under consistency=strict a refusal stops the job; otherwise it asks vime for its own implementation
(`linear_logp_provider_unavailable`), which vime's mode `strict` again makes an error.

Legend: T token rows of this rank, S columns of its vocabulary shard, H hidden size.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Protocol, cast

import msgspec
import torch

from rlk_ledger_kernels import registry
from rlk_ledger_kernels.dtypes import DType
from rlk_ledger_kernels.errors import DecisionError, KernelError, OperandError
from rlk_ledger_kernels.ops.linear_logprob.autograd import linear_logprob
from rlk_ledger_kernels.ops.selected_logprob.contract import LogprobContract
from rlk_ledger_kernels.ops.vocab_parallel_logprob.autograd import vocab_parallel_logprob
from rlk_ledger_kernels.parallel.group import DistributedGroup, Group, SimulatedGroup
from rlk_ledger_kernels.request import AUTO
from rlk_ledger_kernels.schedule import Schedule
from rlk_ledger_schemas.fingerprints import contract_id
from rlk_ledger_schemas.modes import Consistency, Fast, behaviour

VOCAB_TILE = 128
"""Megatron pads the vocabulary so that every rank holds a multiple of 128 columns: boundaries of such tiles everywhere.
`metadata["vocab_tile"]` declares another; runs whose bits are compared must share it."""

REASONS = {
    "vocabulary_undeclared": "the real and padded vocabulary sizes and this rank's place in them are not declared",
    "shard_unaligned": "this rank's shard cuts a vocabulary tile, or the shards leave a gap or overlap",
    "layout_undeclared": "the context-parallel token layout is not declared",
    "mask_unsupported": "a top-p or top-k mask changes the distribution, which this contract does not describe",
    "entropy_unsupported": "entropy is asked for, which this provider does not compute",
    "temperature_unsupported": "the temperature is not one positive number for all rows",
    "gradient_detached": "the request is trained on and a tensor or the result is cut off from autograd",
    "request_malformed": "a tensor of the request has another shape, dtype or device than its fields say",
    "backend_refused": "no backend may run under this mode",
    "fallback": "another backend than an optimised one would stand in",
    "mode_off": "fast=off keeps the engine's own operator",
}
"""Why the provider declines."""

_NAMES: dict[torch.dtype, DType] = {
    torch.float32: "float32",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
}
_LAYOUTS = {False: ("single",), True: ("zigzag", "allgather")}


class LinearLogpRefusedError(KernelError):
    """The provider declines. code: of `REASONS`. linear_logp_provider_unavailable: vime may run its own operator."""

    def __init__(self, code: str, what: str, unavailable: bool) -> None:
        """`what` is a sentence without its full stop."""
        self.code = code
        self.linear_logp_provider_unavailable = unavailable
        super().__init__(f"linear_logp: {what} [{code}]: {REASONS[code]}.")


class Request(Protocol):
    """What is read of a request; more may be there.

    logits: [T, S]. target_ids: int [T], global ids, -100 where there is none. tensor_parallel_group: of
    torch.distributed, or None. token_layout: world_size, rank, layout (`single`, `zigzag`, `allgather`). context: None,
    or hidden [T, H], projection (weight [S, H], bias) and vocab_partition (local_start, local_size, real_size,
    padded_size); without it `metadata` declares real_vocab_size, padded_vocab_size and vocab_start. temperature: None
    where the logits are what the softmax takes. metadata: also vocab_tile, and requires_grad where logits cannot tell.
    """

    logits: torch.Tensor
    target_ids: torch.Tensor
    tensor_parallel_group: Any
    token_layout: Any
    with_entropy: bool
    log_prob_keep_mask: torch.Tensor | None
    context: Any
    temperature: float | torch.Tensor | None
    metadata: Mapping[str, Any]


@dataclass(frozen=True)
class LinearLogpResult:
    """logp: float32 [T, 1] (nats). contract_id: of the whole contract. provenance: what was decided, from what."""

    logp: torch.Tensor
    entropy: None
    backend_id: str
    contract_id: str
    provenance: Mapping[str, Any]


@dataclass(frozen=True)
class _Shard:
    first: int
    real: int


class LinearLogp:
    """A provider under one mode; without arguments the mode is read at every call from RLK_FAST and RLK_CONSISTENCY."""

    def __init__(self, fast: Fast | None = None, consistency: Consistency | None = None, backend: str = AUTO) -> None:
        """fast, consistency: the mode (auto and audit where nothing says otherwise). backend: `auto`, or its name."""
        self._fast = fast
        self._consistency = consistency
        self._backend = backend

    def __call__(self, request: Request) -> LinearLogpResult:
        """Score the targets of one rank's rows, differentiable in logits, or in hidden states and weight.

        Raises LinearLogpRefusedError with a code of `REASONS`, UsageError for a value that is no mode.
        """
        fast = self._fast or cast(Fast, os.environ.get("RLK_FAST", "auto"))
        consistency = self._consistency or cast(Consistency, os.environ.get("RLK_CONSISTENCY", "audit"))
        behaviour(fast, consistency)
        return _Call(request, fast, consistency, self._backend).run()


provider = LinearLogp()
"""What `--linear-logp-provider` names."""


class _Call:
    """One request under one mode."""

    def __init__(self, request: Request, fast: Fast, consistency: Consistency, backend: str) -> None:
        self.request = request
        self.fast = fast
        self.consistency = consistency
        self.backend = backend
        self.metadata: Mapping[str, Any] = getattr(request, "metadata", None) or {}
        self.context: Any = getattr(request, "context", None)

    def run(self) -> LinearLogpResult:
        """Check everything, decide, compute, check what came out."""
        if self.fast == "off":
            raise self.refusal("mode_off", "the mode is fast=off")
        self.check_fields()
        temperature, group, shard = self.temperature(), self.group(), self.shard()
        bias = None if self.context is None else getattr(self.context.projection, "bias", None)
        hidden = self.context is not None and bias is None and temperature is not None
        self.check_gradients(hidden)
        contract = LogprobContract(
            temperature=1.0 if temperature is None else temperature,
            logits=_NAMES[self.request.logits.dtype],
            ignore_index=-100,
            schedule=Schedule(vocab_tile=self.metadata.get("vocab_tile", VOCAB_TILE)),
        )
        identity = contract_id("logprob", "1", msgspec.to_builtins(asdict(contract)))
        decision = self.decide("linear_logprob" if hidden else "vocab_parallel_logprob", group, shard, identity)
        logp_T = self.compute(decision, hidden, shard, contract, group)
        if self.trained() and not logp_T.requires_grad:
            raise self.refusal("gradient_detached", "the log-probabilities have no grad_fn")
        provenance = {
            "decision": decision,
            "source": "hidden" if hidden else "logits",
            "temperature": temperature,
            "vocabulary": shard.real,
            "vocab_tile": contract.schedule.vocab_tile,
            "token_layout": self.request.token_layout.layout,
            "ignored": (self.request.target_ids == -100).sum(),
            "collectives": group.observed(),
        }
        backend_id = f"rlk_ledger.{decision.operator}.{decision.actual}"
        return LinearLogpResult(logp_T[:, None], None, backend_id, identity, provenance)

    def refusal(self, code: str, what: str) -> LinearLogpRefusedError:
        """Strict stops the job; any other mode leaves the choice to vime's."""
        return LinearLogpRefusedError(code, what, unavailable=self.consistency != "strict")

    def check_fields(self) -> None:
        """Shapes, masks, entropy and layout."""
        request, logits = self.request, self.request.logits
        targets = request.target_ids
        fits = logits.dim() == 2 and targets.shape == logits.shape[:1] and targets.device == logits.device
        if not fits or logits.dtype not in _NAMES or targets.dtype not in (torch.int64, torch.int32):
            told = f"logits {logits.dtype} {tuple(logits.shape)}, targets {targets.dtype} {tuple(targets.shape)}"
            raise self.refusal("request_malformed", f"got {told}; pass [T, S] on one device and integer [T]")
        if getattr(request, "log_prob_keep_mask", None) is not None:
            raise self.refusal("mask_unsupported", "log_prob_keep_mask is set")
        if getattr(request, "with_entropy", False):
            raise self.refusal("entropy_unsupported", "with_entropy is set")
        layout = getattr(request, "token_layout", None)
        size, rank = getattr(layout, "world_size", None), getattr(layout, "rank", None)
        if not isinstance(size, int) or not isinstance(rank, int) or not 0 <= rank < size:
            raise self.refusal("layout_undeclared", "token_layout has no valid world_size and rank")
        if getattr(layout, "layout", None) not in _LAYOUTS[size > 1]:
            raise self.refusal("layout_undeclared", f"token_layout.layout must be one of {_LAYOUTS[size > 1]}")

    def temperature(self) -> float | None:
        """One number for all rows; None where the logits are already what the softmax takes."""
        given = getattr(self.request, "temperature", None)
        if given is None:
            return None
        if isinstance(given, torch.Tensor) and given.numel() != 1:
            raise self.refusal("temperature_unsupported", f"temperature has {given.numel()} values")
        number = float(given)
        if not 0.0 < number < float("inf"):
            raise self.refusal("temperature_unsupported", f"temperature is {number}")
        return number

    def group(self) -> Group:
        """The tensor-parallel group; one rank where there is none."""
        given = getattr(self.request, "tensor_parallel_group", None)
        return SimulatedGroup(1) if given is None else DistributedGroup(given)

    def shard(self) -> _Shard:
        """This rank's place in the declared vocabulary."""
        place = getattr(self.context, "vocab_partition", None)
        width = self.request.logits.shape[1]
        if place is not None:
            first, local, real, padded = place.local_start, place.local_size, place.real_size, place.padded_size
        else:
            first, local = self.metadata.get("vocab_start"), width
            real, padded = self.metadata.get("real_vocab_size"), self.metadata.get("padded_vocab_size")
        if not all(type(one) is int for one in (first, local, real, padded)):
            raise self.refusal("vocabulary_undeclared", f"start {first}, real size {real}, padded size {padded}")
        if local != width or first < 0 or first + width > padded or not 0 < real <= padded:
            told = f"columns {first}..{first + width - 1} of {real} tokens padded to {padded}, declared width {local}"
            raise self.refusal("vocabulary_undeclared", told)
        return _Shard(first, real)

    def trained(self) -> bool:
        """Whether gradients must flow: as declared, else when any tensor that may lead to the result asks for one."""
        wanted = self.metadata.get("requires_grad")
        if wanted is None:
            given = [self.request.logits]
            if self.context is not None:
                given += [self.context.hidden, self.context.projection.weight]
            wanted = any(tensor.requires_grad for tensor in given)
        return bool(wanted) and torch.is_grad_enabled()

    def check_gradients(self, hidden: bool) -> None:
        """Refuse inputs that are cut off from autograd where the request is trained on."""
        if not self.trained():
            return
        inputs = {"logits": self.request.logits}
        if hidden:
            inputs = {"hidden": self.context.hidden, "projection.weight": self.context.projection.weight}
        for name, tensor in inputs.items():
            if not tensor.requires_grad:
                raise self.refusal("gradient_detached", f"{name} does not require grad")

    def decide(self, operator: str, group: Group, shard: _Shard, identity: str) -> registry.Decision:
        """Which backend runs."""
        wanted = registry.Request(
            operator=operator,
            backend=self.backend,
            device=self.request.logits.device.type,
            dtype=_NAMES[self.request.logits.dtype],
            autograd="backward" if self.trained() else "forward",
            parallel=("tp",) if group.size > 1 else ("single",),
            topology={"tp": group.size},
            shapes={"vocabulary": shard.real},
            contract_version="1",
            contract_id=identity,
            batch_invariant=True,
        )
        try:
            decision = registry.resolve(wanted, fast=self.fast, consistency=self.consistency)
        except DecisionError as error:
            raise self.refusal("backend_refused", str(error)) from error
        if not decision.implementation or (decision.fallback and self.consistency == "strict"):
            raise self.refusal("fallback", f"{operator} would run on {decision.actual}")
        return decision

    def compute(
        self, decision: registry.Decision, hidden: bool, shard: _Shard, contract: LogprobContract, group: Group
    ) -> torch.Tensor:
        """The log-probabilities, float32 [T]."""
        module, targets = registry.load(decision), self.request.target_ids
        try:
            if not hidden:
                logits = self.request.logits
                return vocab_parallel_logprob(module, logits, shard.first, shard.real, targets, contract, group)
            h, w = self.context.hidden, self.context.projection.weight
            return linear_logprob(module, h, w, targets, contract, shard.first, shard.real, group)
        except OperandError as error:
            cut = any(word in str(error) for word in ("cuts a vocabulary tile", "gap", "overlap"))
            raise self.refusal("shard_unaligned" if cut else "request_malformed", str(error)) from error
