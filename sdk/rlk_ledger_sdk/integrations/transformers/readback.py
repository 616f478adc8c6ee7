"""Settings of a live transformers model: as requested, as its configuration holds them, as its modules show them."""

from collections.abc import Mapping
from typing import Any

from rlk_ledger_sdk.integrations.torch import record_determinism, short_dtype
from rlk_ledger_sdk.integrations.transformers.numerics import dtypes, unwrapped
from rlk_ledger_sdk.knobs import UNOBSERVABLE, read_back

_EVIDENCE = {
    "model.dtype": "dtypes of the live parameters",
    "model.attention": "the configuration object the attention modules dispatch on",
    "model.training_mode": "the live module",
    "model.gradient_checkpointing": "flags of the live modules",
    "model.use_cache": "the model's configuration; generate() may override it for a call",
    "model.compiled": "the compiled wrapper or call of the live module",
}


def record_settings(model: Any, requested: Mapping[str, Any] | None = None) -> None:
    """Records the settings of `model` and torch's switches, one `knob.applied` each.

    requested: what the job asked for, by path (`model.dtype`, `model.attention`, `torch.num_threads` ...).
    """
    asked = dict(requested or {})
    if "model.dtype" in asked:
        asked["model.dtype"] = short_dtype(asked["model.dtype"])
    for path, (materialized, actual) in _readings(model).items():
        read_back(
            path,
            requested=asked.get(path),
            materialized=materialized,
            actual=actual,
            evidence=_EVIDENCE[path],
            lifecycle="engine",
        )
    record_determinism({path: value for path, value in asked.items() if not path.startswith("model.")})


def _readings(model: Any) -> dict[str, tuple[Any, Any]]:
    """(materialised, actual) of every setting, by path."""
    inner = unwrapped(model)
    config = inner.config
    stored = getattr(config, "dtype", None) or getattr(config, "torch_dtype", None)
    checkpointing = [m for m in inner.modules() if getattr(m, "gradient_checkpointing", False)]
    compiled = model is not inner and "_orig_mod" in getattr(model, "_modules", {})
    return {
        "model.dtype": (None if stored is None else short_dtype(stored), dtypes(inner.parameters())),
        "model.attention": (getattr(config, "_attn_implementation", None), _attention(inner)),
        "model.training_mode": (None, bool(inner.training)),
        "model.gradient_checkpointing": (None, bool(checkpointing)),
        "model.use_cache": (None, getattr(config, "use_cache", UNOBSERVABLE)),
        "model.compiled": (None, bool(compiled or getattr(model, "_compiled_call_impl", None) is not None)),
    }


def _attention(model: Any) -> Any:
    """The implementations the attention modules name, joined by `+`; unobservable where none names one."""
    configs = [m.config for m in model.modules() if type(m).__name__.endswith("Attention") and hasattr(m, "config")]
    names = {getattr(config, "_attn_implementation", None) for config in configs} - {None}
    return "+".join(sorted(map(str, names))) if names else UNOBSERVABLE
