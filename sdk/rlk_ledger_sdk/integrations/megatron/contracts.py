"""What a live Megatron model promises about its numbers: contract bodies read from its modules and configuration."""

from typing import Any

from rlk_ledger_sdk.integrations.megatron.modules import dtypes_of, name_of


def logprob_body(model: Any, logits: Any, temperature: float, vocabulary: tuple[int, int]) -> dict[str, Any]:
    """The logprob contract of these logits: dtypes as seen (none without logits), temperature as the caller's.

    Megatron's softmax sums over every entry of the padded vocabulary unless the caller masks them.
    """
    size, counted = vocabulary
    return {
        "mode": "processed",
        "temperature": temperature,
        "top_p": 1.0,
        "top_k": -1,
        "compute_dtype": compute_dtype(model),
        "head_dtype": None if logits is None else head_dtype(model, logits),
        "logits_dtype": None if logits is None else name_of(logits.dtype),
        "padded_vocab": size,
        "padded_vocab_policy": "include" if counted == size else "mask",
        "alignment": "token_i_given_before_i",
        "execution_path": "full_prefill",
    }


def compute_dtype(model: Any) -> str:
    """The dtype activations have: autocast's where the configuration enables it, else the parameters'."""
    config = model.config
    if getattr(config, "enable_autocast", False) and getattr(config, "autocast_dtype", None) is not None:
        return name_of(config.autocast_dtype)
    dtypes = dtypes_of(model)
    return dtypes if "+" not in dtypes else name_of(config.params_dtype)


def head_dtype(model: Any, logits: Any) -> str:
    """The dtype the output layer multiplies in.

    Megatron-core's own layer is a torch product, whose operands have the dtype of its result, whatever the weight is
    stored in; for another layer the dtype of the weight, its own or the embedding's, is what can be seen.
    """
    layer = model.output_layer
    if type(layer).__module__ == "megatron.core.tensor_parallel.layers":
        return name_of(logits.dtype)
    weight = getattr(layer, "weight", None)
    if weight is None:
        weight = model.shared_embedding_or_output_weight()
    return name_of(weight.dtype)


def norm_body(model: Any) -> dict[str, Any] | None:
    """The norm contract, from the first normalisation module of the first layer; None where there is none."""
    norm = _first_norm(model)
    if norm is None:
        return None
    body: dict[str, Any] = {"eps": float(getattr(norm, "eps", model.config.layernorm_epsilon))}
    if type(norm).__module__.startswith("torch.nn"):  # one fused operator: float32 inside, one rounding at the end
        body |= {"accumulate_dtype": "float32", "rounding_order": "kernel"}
    return body


def _first_norm(model: Any) -> Any | None:
    layers = getattr(model.decoder, "layers", ())
    for layer in layers:
        norm = getattr(layer, "input_layernorm", None)
        if norm is not None and hasattr(norm, "weight"):
            return norm
    return None


def attention_body(model: Any) -> dict[str, Any] | None:
    """The attention contract, from the core attention of the first layer; None where there is none."""
    core = core_attention(model)
    if core is None:
        return None
    config = model.config
    scale = getattr(core, "softmax_scale", None)
    if not isinstance(scale, float):
        scale = getattr(config, "softmax_scale", None) or float(config.kv_channels) ** -0.5
    kind = getattr(core, "attn_mask_type", None)
    window = getattr(config, "window_size", None)
    unfused = type(core).__name__ == "DotProductAttention"  # scores leave a batched product in the compute dtype
    return {
        "downcast_point": "scores" if unfused else None,
        "mode": getattr(kind, "name", str(kind)) if kind is not None else None,
        "softmax_scale": scale,
        "window": list(window) if window else None,
        "output_dtype": compute_dtype(model),
    }


def core_attention(model: Any) -> Any | None:
    """The module of the first layer that computes attention proper."""
    for layer in getattr(model.decoder, "layers", ()):
        core = getattr(getattr(layer, "self_attention", None), "core_attention", None)
        if core is not None:
            return core
    return None


def rope_body(model: Any) -> dict[str, Any] | None:
    """The rope contract, from the model's rotary embedding; None for other position embeddings."""
    if getattr(model, "position_embedding_type", None) != "rope":
        return None
    config = model.config
    rotary = getattr(model, "rotary_pos_emb", None)
    percent = float(getattr(model, "rotary_percent", 1.0))
    return {
        "theta": float(model.rotary_base) if hasattr(model, "rotary_base") else None,
        "scaling": "llama3" if getattr(model, "rotary_scaling", False) else None,
        "rotary_dim": int(config.kv_channels * percent),
        "layout": "interleaved" if getattr(rotary, "rotary_interleaved", False) else "half",
        "table_dtype": None if config.apply_rope_fusion else compute_dtype(model),
        "fused": bool(config.apply_rope_fusion),
    }
