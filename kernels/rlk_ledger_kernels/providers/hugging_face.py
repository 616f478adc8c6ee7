"""One line makes a Hugging Face model deterministic and batch-invariant, forward and backward.

    from rlk_ledger_kernels.providers.hugging_face import patch, selected_logprobs

    with patch(model):                                            # or: patch(model) ... unpatch(model)
        logprobs_BT = selected_logprobs(model, ids_BT, attention_mask=mask_BT, temperature=0.7)
        logprobs_BT.sum().backward()

Every RMSNorm, linear layer, gated MLP, rotary table, embedding and attention of the model runs on this package's
operators; the rotation itself and residual additions are element by element and stay. What a token gets depends on
its own sequence alone: not on the batch, its neighbours, padding (side and amount) or packing. Weight gradients are
sums over the tokens of the batch in their order. Parameters, buffers and the state dict are not touched.

Legend: B rows of a batch, T tokens of a row, N tokens, H hidden size, D head_dim.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from types import ModuleType, TracebackType
from typing import Any

import torch
from torch import nn

from rlk_ledger_kernels.dtypes import DType
from rlk_ledger_kernels.errors import ContractError, OperandError
from rlk_ledger_kernels.ops.attention.autograd import PackedAttention, PackedPrefill
from rlk_ledger_kernels.ops.attention.contract import AttentionContract
from rlk_ledger_kernels.ops.embedding.autograd import embedding
from rlk_ledger_kernels.ops.linear.autograd import linear
from rlk_ledger_kernels.ops.linear.contract import LinearContract
from rlk_ledger_kernels.ops.linear_logprob.autograd import linear_logprob
from rlk_ledger_kernels.ops.linear_logprob.contract import LogprobContract
from rlk_ledger_kernels.ops.rms_norm.autograd import rms_norm
from rlk_ledger_kernels.ops.rms_norm.contract import RmsNormContract
from rlk_ledger_kernels.ops.rope.contract import RopeContract
from rlk_ledger_kernels.ops.rope.table import RopeTable, rope_table
from rlk_ledger_kernels.ops.swiglu.autograd import swiglu
from rlk_ledger_kernels.ops.swiglu.contract import SwigluContract
from rlk_ledger_kernels.providers.packed_rows import PackedRows, own_positions, packed_rows
from rlk_ledger_kernels.registry import Decision, Request, load, resolve
from rlk_ledger_kernels.schedule import Schedule

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
OPERATORS = ("attention", "embedding", "linear", "linear_logprob", "rms_norm", "swiglu")
ATTENTION = "rlk_ledger"
"""The name under which attention is registered with transformers."""

_ROPES = ("default", "linear", "llama3", "yarn")
_PATCH, _OWNER = "_rlk_ledger_patch", "_rlk_ledger_owner"
_NAMES: dict[torch.dtype, DType] = {
    torch.float32: "float32",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
}


class Patch:
    """A patched model, and a context manager that takes the patch off. decisions: which backend runs each operator."""

    def __init__(self, model: Any, backend: str, schedule: Schedule) -> None:
        """Check the whole model before anything is changed; made by `patch`."""
        self.model = model
        self.schedule = schedule
        self.dtype = _check(model)
        device = model.device.type
        self.decisions: dict[str, Decision] = {
            name: resolve(_request(name, backend, device, self.dtype, model.config)) for name in OPERATORS
        }
        self.modules: Mapping[str, ModuleType] = {name: load(one) for name, one in self.decisions.items()}
        self._undo: list[Callable[[], object]] = []
        self._packed: tuple[torch.Tensor | None, torch.Tensor, PackedRows] | None = None
        self._plans: dict[int | None, PackedPrefill] = {}
        self._tables: dict[int, RopeTable] = {}

    def __enter__(self) -> Patch:
        """The patch, which is on since it was made."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Take it off."""
        self.remove()

    def apply(self) -> None:
        """Put it on: forward methods of single modules, the attention implementation, two hooks."""
        from transformers import AttentionInterface, AttentionMaskInterface

        AttentionInterface.register(ATTENTION, _attention)
        AttentionMaskInterface.register(ATTENTION, _mask)
        config, before = self.model.config, self.model.config._attn_implementation
        config._attn_implementation = ATTENTION
        self._undo.append(partial(setattr, config, "_attn_implementation", before))
        for module in self.model.modules():
            forward = self._forward_of(module)
            if forward is not None:
                module.forward = forward
                self._undo.append(partial(module.__dict__.pop, "forward", None))
            if hasattr(module, "q_proj") and hasattr(module, "o_proj"):
                module.__dict__[_OWNER] = self
                self._undo.append(partial(module.__dict__.pop, _OWNER, None))
        base = self.model.model
        before_hook = base.register_forward_pre_hook(self._before, with_kwargs=True)
        after_hook = base.register_forward_hook(self._after, always_call=True)
        self._undo += [before_hook.remove, after_hook.remove]
        self.model.__dict__[_PATCH] = self
        self._undo.append(partial(self.model.__dict__.pop, _PATCH, None))

    def remove(self) -> None:
        """Take it off; the model is then what it was, bit for bit. Safe to call twice."""
        while self._undo:
            self._undo.pop()()

    def _forward_of(self, module: nn.Module) -> Callable[..., torch.Tensor] | None:
        """What replaces the forward method of one module; None keeps its own."""
        held: Any = module
        if type(module) is nn.Linear:
            return lambda x: self._linear(held, x)
        if type(module) is nn.Embedding:
            return lambda ids: self._embedding(held, ids)
        if _is_norm(module):
            contract = RmsNormContract(eps=held.variance_epsilon, output=self.dtype, schedule=self.schedule)
            return lambda x: rms_norm(self.modules["rms_norm"], x, held.weight, contract)
        if hasattr(module, "gate_proj") and hasattr(module, "down_proj"):
            gated = SwigluContract(output=self.dtype)
            return lambda x: held.down_proj(swiglu(self.modules["swiglu"], held.gate_proj(x), held.up_proj(x), gated))
        if hasattr(module, "inv_freq"):
            return lambda x, position_ids: self._rotary(held, x, position_ids)  # type: ignore[return-value]
        return None

    def _linear(self, module: Any, x: torch.Tensor) -> torch.Tensor:
        contract = LinearContract(output=self.dtype, schedule=self.schedule)
        rows_NK = x.reshape(-1, x.shape[-1])
        y_NO = linear(self.modules["linear"], rows_NK, module.weight, contract, module.bias)
        return y_NO.view(*x.shape[:-1], -1)

    def _embedding(self, module: Any, ids: torch.Tensor) -> torch.Tensor:
        ids_N = ids.reshape(-1)
        x_NH = embedding(self.modules["embedding"], ids_N, module.weight)
        if module.padding_idx is not None:
            x_NH = torch.where((ids_N == module.padding_idx)[:, None], x_NH.detach(), x_NH)
        return x_NH.view(*ids.shape, -1)

    def _rotary(self, module: Any, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines from one table, whose entries depend on their position alone."""
        size = 1 << max(10, int(position_ids.max()).bit_length())
        if size not in self._tables:
            made = rope_table(module.inv_freq.to("cpu", torch.float32), size, RopeContract())
            self._tables = {size: made.to(x.device)}
        rows = self._tables[size].at(position_ids.reshape(-1))
        half = rows.sin_PD.shape[1] // 2
        sin = torch.cat((rows.sin_PD[:, half:], rows.sin_PD[:, half:]), -1)
        shape = (*position_ids.shape, -1)
        scaling = module.attention_scaling
        return (rows.cos_PD * scaling).view(shape).to(x.dtype), (sin * scaling).view(shape).to(x.dtype)

    def _before(self, module: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Give padded rows positions that count their own tokens, as `generate` does."""
        if torch.is_autocast_enabled(self.model.device.type):
            raise ContractError(
                f"hugging_face: autocast would change the contract; leave it, the model computes in {self.dtype}"
            )
        mask = kwargs.get("attention_mask")
        if mask is not None and not (isinstance(mask, torch.Tensor) and mask.dim() == 2):
            raise OperandError("hugging_face: attention_mask must be [rows, tokens]; prepared masks are not read")
        used = kwargs.get("cache") or kwargs.get("past_key_values")
        if used is not None and used.get_seq_length():
            raise OperandError("hugging_face: a patched model scores whole sequences; call it without a filled cache")
        if mask is not None and kwargs.get("position_ids") is None:
            kwargs = {**kwargs, "position_ids": own_positions(mask)}
        return args, kwargs

    def _after(self, module: Any, args: Any, output: Any) -> None:
        self._packed, self._plans = None, {}

    def attend(
        self,
        q_BHTD: torch.Tensor,
        k_BKTD: torch.Tensor,
        v_BKTD: torch.Tensor,
        mask_BT: torch.Tensor | None,
        position_ids: torch.Tensor,
        contract: AttentionContract,
    ) -> torch.Tensor:
        """Attention of every sequence of a batch to itself; zeros at padding. Returns [B, T, heads, D]."""
        rows, heads, tokens, head_dim = q_BHTD.shape
        if k_BKTD.shape[2] != tokens:
            raise OperandError("hugging_face: a patched model scores whole sequences; call it without a filled cache")
        where = self._rows(mask_BT, position_ids.expand(rows, tokens))
        if contract.window not in self._plans:
            self._plans[contract.window] = PackedPrefill(where.lengths, contract, q_BHTD.device)
        q_NHD, k_NKD, v_NKD = (
            one.transpose(1, 2).flatten(0, 1).index_select(0, where.at_N) for one in (q_BHTD, k_BKTD, v_BKTD)
        )
        attention = self.modules["attention"]
        out_NHD = PackedAttention.apply(attention, q_NHD, k_NKD, v_NKD, self._plans[contract.window], contract)[0]  # type: ignore[no-untyped-call]
        empty: torch.Tensor = out_NHD.new_zeros((rows * tokens, heads, head_dim))
        return empty.index_copy(0, where.at_N, out_NHD).view(rows, tokens, heads, head_dim)

    def _rows(self, mask_BT: torch.Tensor | None, positions_BT: torch.Tensor) -> PackedRows:
        """Found once per forward pass: all layers share mask and positions."""
        held = self._packed
        if held is None or held[0] is not mask_BT or not torch.equal(held[1], positions_BT):
            self._packed = (mask_BT, positions_BT, packed_rows(mask_BT, positions_BT))
            self._plans = {}
            return self._packed[2]
        return held[2]


def patch(model: Any, backend: str = "auto", schedule: Schedule | None = None) -> Patch:
    """Put deterministic, batch-invariant operators into a model of `ARCHITECTURES`.

    model: a causal language model of transformers, all parameters of one dtype. backend: `auto` (the best one that
    preserves the contract on the model's device) or a name. Raises ContractError naming what is not known: another
    architecture, a layer that is none of those replaced (adapters, quantised layers), dropout, a rope that changes with
    length, mixed dtypes, a model that is patched already.
    """
    made = Patch(model, backend, schedule or Schedule())
    try:
        made.apply()
    except BaseException:
        made.remove()
        raise
    return made


def unpatch(model: Any) -> None:
    """Take the patch off; raises ContractError when there is none."""
    _patch_of(model).remove()


def selected_logprobs(
    model: Any,
    ids_BT: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    position_ids: torch.Tensor | None = None,
    temperature: float = 1.0,
) -> torch.Tensor:
    """log softmax(logits / temperature) of each token given those before it, without the [tokens, vocabulary] logits.

    ids_BT: int64 [B, T]. Returns float32 [B, T] (nats), differentiable; exactly 0 at padding and at the first token of
    each row. In packed rows the first token of every later sequence is scored as a continuation of the last: mask it.
    Raises ContractError for a model that is not patched.
    """
    held = _patch_of(model)
    output = model.model(input_ids=ids_BT, attention_mask=attention_mask, position_ids=position_ids, use_cache=False)
    targets_BT = torch.full_like(ids_BT, -100)
    targets_BT[:, :-1] = ids_BT[:, 1:]
    if attention_mask is not None:
        real = attention_mask.bool()
        targets_BT[:, :-1] = torch.where(real[:, :-1] & real[:, 1:], targets_BT[:, :-1], -100)
    contract = LogprobContract(temperature=temperature, logits=held.dtype, ignore_index=-100, schedule=held.schedule)
    hidden_NH = output.last_hidden_state.flatten(0, 1)
    module, head = held.modules["linear_logprob"], model.lm_head.weight
    scored_BT = linear_logprob(module, hidden_NH, head, targets_BT.flatten(), contract).view(ids_BT.shape)
    return torch.cat((torch.zeros_like(scored_BT[:, :1]), scored_BT[:, :-1]), dim=1)


def _patch_of(model: Any) -> Patch:
    held = model.__dict__.get(_PATCH)
    if not isinstance(held, Patch):
        raise ContractError(f"hugging_face: this {type(model).__name__} is not patched; call patch(model) first")
    return held


def _attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    position_ids: torch.Tensor | None = None,
    **ignored: Any,
) -> tuple[torch.Tensor, None]:
    """Attention as transformers calls it; the owner is the patch on the layer's model."""
    owner: Patch | None = module.__dict__.get(_OWNER)
    if owner is None or position_ids is None or dropout:
        raise ContractError(f"hugging_face: attention {ATTENTION!r} runs in models that `patch` has prepared")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    contract = AttentionContract(scale=scale, output=owner.dtype, schedule=owner.schedule)
    if sliding_window is not None:
        contract = replace(contract, window=sliding_window)
    return owner.attend(query, key, value, attention_mask, position_ids, contract), None


def _mask(*args: Any, attention_mask: torch.Tensor | None = None, **ignored: Any) -> torch.Tensor | None:
    """The padding mask as it came; causality, windows and packing are in the plan."""
    return attention_mask


def _is_norm(module: nn.Module) -> bool:
    return type(module).__name__.endswith("RMSNorm") and hasattr(module, "variance_epsilon")


def _check(model: Any) -> DType:
    """The compute dtype of a model that can be patched; raises ContractError naming what cannot."""
    name = type(model).__name__
    if name not in ARCHITECTURES:
        raise ContractError(f"hugging_face: {name} is not known; known are {', '.join(ARCHITECTURES)}")
    if isinstance(model.__dict__.get(_PATCH), Patch):
        raise ContractError(f"hugging_face: this {name} is patched already; unpatch it first")
    config = model.config
    if config.hidden_act not in ("silu", "swish"):
        raise ContractError(f"hugging_face: hidden_act is {config.hidden_act!r}; only silu has an operator here")
    if getattr(config, "attention_dropout", 0.0):
        raise ContractError("hugging_face: attention_dropout is not 0; dropout has no batch-invariant form here")
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if rope not in _ROPES:
        raise ContractError(f"hugging_face: rope_type {rope!r} is not known; known are {', '.join(_ROPES)}")
    for path, module in model.named_modules():
        if "forward" in module.__dict__:
            raise ContractError(f"hugging_face: {path or name} has a forward of its own (another patch); remove it")
        known = type(module) in (nn.Linear, nn.Embedding) or _is_norm(module)
        if not known and next(module.parameters(recurse=False), None) is not None:
            raise ContractError(f"hugging_face: {path} is a {type(module).__name__}, which has no operator here")
    dtypes = {parameter.dtype for parameter in model.parameters()}
    if len(dtypes) != 1 or not dtypes <= _NAMES.keys():
        told = ", ".join(sorted(str(one) for one in dtypes))
        raise ContractError(f"hugging_face: parameters are {told}; one of float32, bfloat16, float16 for all is needed")
    return _NAMES[dtypes.pop()]


def _request(operator: str, backend: str, device: str, dtype: DType, config: Any) -> Request:
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return Request(
        operator=operator,
        backend=backend,
        device=device,
        dtype=dtype,
        autograd="backward",
        parallel=("single",),
        shapes={"hidden": config.hidden_size, "head_dim": head_dim, "vocabulary": config.vocab_size},
        contract_version="1",
        batch_invariant=True,
    )
