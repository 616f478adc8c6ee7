"""Contracts read from the live modules of a model: what they are made of, and what a probe shows them doing.

A probe draws no random number and touches no parameter. Sharding wrappers leave modules whose weights are views of
freed memory, so no probe reads a live weight unless it is whole.
"""

import sys
from collections.abc import Mapping
from typing import Any

from rlk_ledger_sdk.declared import declare
from rlk_ledger_sdk.integrations.fsdp import is_sharded, param_dtype
from rlk_ledger_sdk.integrations.torch import short_dtype

_WRAPPERS = ("_orig_mod", "module", "_fsdp_wrapped_module")


def unwrapped(model: Any) -> Any:
    """The causal language model inside compile, data-parallel and PEFT wrappers."""
    while True:
        inner = next((getattr(model, name) for name in _WRAPPERS if name in getattr(model, "_modules", {})), None)
        if inner is None:
            break
        model = inner
    base = getattr(model, "get_base_model", None)
    return base() if callable(base) else model


def dtypes(parameters: Any) -> str:
    """The dtypes of tensors, joined by `+`: `bfloat16`, or `bfloat16+float32` where they are mixed."""
    return "+".join(sorted({short_dtype(p.dtype) for p in parameters}))


def compute_dtype(model: Any) -> str | None:
    """The dtype the layers compute in: autocast's, else FSDP's, else that of their weight matrices, if it is one.

    Embeddings and the head are left out: the head has a dtype of its own in the logprob contract.
    """
    torch = sys.modules["torch"]
    first = next(iter(model.parameters()), None)
    if first is None:
        return None
    if torch.is_autocast_enabled(first.device.type):
        return short_dtype(torch.get_autocast_dtype(first.device.type))
    inner = unwrapped(model)
    ends = [getattr(inner, name, None) for name in ("get_input_embeddings", "get_output_embeddings")]
    apart = {id(getattr(get(), "weight", None)) for get in ends if callable(get)}
    if is_sharded(model):
        layer = next((m for m in inner.modules() if type(m).__name__.endswith(("Attention", "MLP"))), inner)
        policy = param_dtype(layer, model)
        if policy is not None:
            return policy
    found = dtypes(p for p in inner.parameters() if p.ndim > 1 and id(p) not in apart)
    if not found:  # nothing but embeddings, or flat parameters
        found = dtypes(inner.parameters())
    return found if "+" not in found else None


def declare_numerics(model: Any) -> None:
    """Declares the norm, attention and rope contracts of the modules of `model`; what cannot be read is left out."""
    for kind, body in (("norm", norm_body(model)), ("attention", attention_body(model)), ("rope", rope_body(model))):
        if body is not None and any(value is not None for value in body.values()):
            declare(kind, body)


def norm_body(model: Any) -> dict[str, Any] | None:
    """eps and rounding order of the RMS norms; None without any."""
    norms = [m for m in model.modules() if type(m).__name__.endswith("RMSNorm")]
    if not norms:
        return None
    kinds = {type(m): m for m in norms}.values()
    eps = {getattr(m, "variance_epsilon", getattr(m, "eps", None)) for m in norms}
    orders = {rounding_order(m) for m in kinds}
    known = len(orders) == 1 and None not in orders
    return {
        "eps": eps.pop() if len(eps) == 1 else None,
        "accumulate_dtype": "float32" if known else None,
        "rounding_order": orders.pop() if known else None,
    }


def rounding_order(norm: Any) -> str | None:
    """`hf` where a norm rounds before it multiplies by its weight, `kernel` where after; None where neither fits.

    Measured in bfloat16, where the two differ, on a fresh module of its class with made-up weights; both forms sum in
    float32.
    """
    torch = sys.modules["torch"]
    eps = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    if eps is None or not hasattr(norm, "weight") or "forward" in vars(norm):
        return None
    with torch.no_grad():
        index = torch.arange(8 * 64, dtype=torch.float32).reshape(8, 64)
        x = ((index * 1.7).sin() * 3).to(torch.bfloat16)
        w = ((index[0] * 0.37).cos() + 1.3).to(torch.bfloat16)
        made: Any = type(norm)
        probe = made.__new__(made)
        torch.nn.Module.__init__(probe)
        vars(probe).update({n: v for n, v in vars(norm).items() if isinstance(v, bool | int | float | str)})
        probe.weight = torch.nn.Parameter(w)
        seen = made.forward(probe, x)
        unit = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + eps)
        for scale in (w, 1 + w.float()):
            if torch.equal(seen, (scale.to(torch.bfloat16) * unit.to(torch.bfloat16))):
                return "hf"
            if torch.equal(seen, (scale.float() * unit).to(torch.bfloat16)):
                return "kernel"
    return None


def attention_body(model: Any) -> dict[str, Any] | None:
    """Softmax scale, window and the dtype attention hands on; None without attention modules."""
    modules = [m for m in model.modules() if type(m).__name__.endswith("Attention")]
    if not modules:
        return None
    scales = {m.scaling for m in modules if isinstance(getattr(m, "scaling", None), float)}
    causal = {getattr(m, "is_causal", None) for m in modules}
    windows = {getattr(m, "sliding_window", None) for m in modules}
    return {
        "mode": "causal" if causal == {True} else None,
        "softmax_scale": scales.pop() if len(scales) == 1 else None,
        "window": windows.pop() if len(windows) == 1 else None,
        "output_dtype": compute_dtype(model),
    }


def rope_body(model: Any) -> dict[str, Any] | None:
    """Theta, scaling, rotary size and the dtype of the table that a probe of the live module returns."""
    torch = sys.modules["torch"]
    rotary = next((m for m in model.modules() if type(m).__name__.endswith("RotaryEmbedding")), None)
    if rotary is None or not hasattr(rotary, "inv_freq"):
        return None
    config = text_config(unwrapped(model))
    parameters = getattr(config, "rope_parameters", None) or {}
    theta = parameters.get("rope_theta") if isinstance(parameters, Mapping) else None
    theta = theta if theta is not None else getattr(config, "rope_theta", None)
    kind = getattr(rotary, "rope_type", "default")
    dtype, table = compute_dtype(model), None
    if dtype is not None and kind == "default":  # other kinds may change their state with the positions they see
        x = torch.zeros(1, 1, 1, dtype=getattr(torch, dtype), device=rotary.inv_freq.device)
        with torch.no_grad():
            table = type(rotary).forward(rotary, x, torch.zeros(1, 1, dtype=torch.long, device=x.device))[0].dtype
    return {
        "theta": None if theta is None else float(theta),
        "scaling": None if kind == "default" else str(kind),
        "rotary_dim": 2 * rotary.inv_freq.shape[-1],
        "table_dtype": None if table is None else short_dtype(table),
    }


def text_config(model: Any) -> Any:
    """The configuration of the language model, also inside a multimodal one."""
    get = getattr(model.config, "get_text_config", None)
    return get() if callable(get) else model.config


def logprob_body(model: Any, **semantics: Any) -> dict[str, Any]:
    """A logprob contract of `model`: `semantics` (mode, temperature, top_p ...) over what its head shows.

    head_dtype is the dtype of the head's weight, or autocast's; logits_dtype that of the logits a probe of the live
    head returns. Entries that cannot be read are None.
    """
    inner = unwrapped(model)
    head = inner.get_output_embeddings() if hasattr(inner, "get_output_embeddings") else None
    produced, size, softcap = None, None, None
    if head is not None and getattr(head, "weight", None) is not None:
        size = int(head.weight.shape[0])
        produced = _produced(head, model)
        softcap = getattr(text_config(inner), "final_logit_softcapping", None)
    body = {
        "compute_dtype": compute_dtype(model),
        "head_dtype": produced,
        "logits_dtype": produced,
        "reduction_dtype": "float32",
        "padded_vocab": size,
        "padded_vocab_policy": None if size is None else "include",
        "alignment": "token_i_given_before_i",
        "softcap": softcap,
    }
    return {name: value for name, value in {**body, **semantics}.items() if value is not None}


def _produced(head: Any, model: Any) -> str | None:
    """The dtype of the logits the live head makes from one hidden state of the model's compute dtype."""
    torch = sys.modules["torch"]
    dtype = compute_dtype(model)
    if is_sharded(model):  # no probe: running one module of a sharded model alone is not the model's own way
        return param_dtype(head, model) or short_dtype(head.weight.dtype)
    if dtype is None or not _plain(head.weight):
        return None
    hidden = torch.zeros(1, head.weight.shape[-1], dtype=getattr(torch, dtype), device=head.weight.device)
    try:
        with torch.no_grad():
            return short_dtype(head(hidden).dtype)
    except (RuntimeError, TypeError):  # a head that takes another dtype than its model hands on
        return short_dtype(head.weight.dtype)


def _plain(tensor: Any) -> bool:
    """Whether a parameter is whole, in memory, and no shard of a distributed tensor."""
    if hasattr(tensor, "device_mesh") or tensor.device.type == "meta":
        return False
    return bool(tensor.untyped_storage().size() >= tensor.numel() * tensor.element_size())


def narrower(made: str | None, returned: str) -> str:
    """The dtype logits were rounded to: what the head made, or what the model returned where that has fewer bits.

    Wrappers of mixed precision return float32 of what was rounded before.
    """
    bits = {"float64": 64, "float32": 32, "bfloat16": 16, "float16": 16}
    return returned if made is None or bits.get(returned, 0) < bits.get(made, 0) else made
