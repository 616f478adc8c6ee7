"""Names of number formats: `bf16`, `torch.bfloat16` and `bfloat16` are one."""

from typing import Any

_ALIASES: dict[str, tuple[str, ...]] = {
    "bfloat16": ("bf16",),
    "float16": ("fp16", "f16", "half"),
    "float32": ("fp32", "f32", "float", "single"),
    "float64": ("fp64", "f64", "double"),
}
_NAMES = {alias: name for name, aliases in _ALIASES.items() for alias in (name, *aliases)}
_PREFIXES = ("torch.", "numpy.", "np.", "jnp.", "jax.numpy.")


def dtype_name(value: Any) -> str | None:
    """The one name of a number format however it is written (`BF16`, `torch.bfloat16`, a dtype object), else None."""
    name = str(value).strip().lower()
    for prefix in _PREFIXES:
        name = name.removeprefix(prefix)
    return _NAMES.get(name)
