"""The parts of a Megatron model that the recorder looks at, found under any wrapping."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from rlk_ledger_schemas.errors import UsageError


class Stage(NamedTuple):
    """This rank's model chunks, unwrapped, and what wraps the first one (outermost first)."""

    chunks: tuple[Any, ...]
    wrappers: tuple[Any, ...]

    @property
    def first(self) -> Any:
        """The first chunk."""
        return self.chunks[0]

    @property
    def scoring(self) -> Any | None:
        """The chunk that holds the output layer, or None on an earlier pipeline stage."""
        return next((chunk for chunk in self.chunks if getattr(chunk, "post_process", False)), None)


def unwrap(model: Any) -> Stage:
    """The GPTModel chunks inside `model`: one module or a list of them (interleaved pipeline stages).

    DistributedDataParallel, Float16Module and any wrapper that keeps what it wraps under `module` are stepped through.
    Raises UsageError for what is no Megatron model.
    """
    given = tuple(model) if isinstance(model, Sequence) else (model,)
    pairs = [_inner(one) for one in given]
    if not pairs:
        raise UsageError("megatron.attach: the list of model chunks is empty.")
    return Stage(tuple(inner for inner, _ in pairs), tuple(pairs[0][1]))


def _inner(module: Any) -> tuple[Any, list[Any]]:
    wrappers = []
    while not _is_model(module) and hasattr(module, "module"):
        wrappers.append(module)
        module = module.module
    if not _is_model(module):
        kind = type(module)
        raise UsageError(
            f"megatron.attach: {kind.__module__}.{kind.__name__} is no GPTModel: it has no `config`, `decoder` and "
            "`post_process`; pass the model of megatron.core, wrapped or not."
        )
    return module, wrappers


def _is_model(module: Any) -> bool:
    return all(hasattr(module, name) for name in ("config", "decoder", "post_process"))


def name_of(dtype: Any) -> str:
    """A torch dtype's own name without its module."""
    return str(dtype).removeprefix("torch.")


def dtypes_of(model: Any) -> str:
    """The dtypes of a model's parameters, joined by + when there are several."""
    return "+".join(sorted({name_of(parameter.dtype) for parameter in model.parameters()}))
