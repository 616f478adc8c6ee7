"""The tensors a vLLM model holds, by the names of the checkpoint: fused projections taken apart as views.

On a CPU the engine repacks its linear weights and lets the originals go, so they are read at the last moment they can
be: when everything is loaded and nothing has been repacked yet.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch


class LoadedTensors:
    """While open, takes the parameters of the model being loaded, after loading and before repacking."""

    def __init__(self) -> None:
        """Nothing is taken yet."""
        self.tensors: dict[str, torch.Tensor] = {}
        self.how = "not read: this version of vLLM loads models another way"
        self._module: Any = None

    def __enter__(self) -> LoadedTensors:
        """Wraps the step that repacks weights, where this version has it."""
        from vllm.model_executor.model_loader import base_loader

        if hasattr(base_loader, "process_weights_after_loading"):
            self._module, self._process = base_loader, base_loader.process_weights_after_loading
            base_loader.process_weights_after_loading = self._before
        return self

    def __exit__(self, *_: object) -> None:
        """Puts it back."""
        if self._module is not None:
            self._module.process_weights_after_loading = self._process

    def _before(self, model: Any, *rest: Any, **named: Any) -> Any:
        self.tensors = {name: tensor.detach().clone() for name, tensor in held_tensors(model)}
        self.how = "read back from the parameters after loading, before the engine repacks them"
        return self._process(model, *rest, **named)


def held_tensors(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """The model's parameters under the names of the checkpoint; vocabulary padding and a tied head are left out."""
    packed = {name: tuple(parts) for name, parts in getattr(model, "packed_modules_mapping", {}).items()}
    modules = dict(model.named_modules())
    for name, parameter in model.named_parameters():
        owner, _, kind = name.rpartition(".")
        base, _, leaf = owner.rpartition(".")
        module = modules[owner]
        if leaf in packed:
            for part, piece in zip(packed[leaf], parameter.split(list(module.output_sizes), dim=0)):
                yield f"{base}.{part}.{kind}", piece
        elif hasattr(module, "org_vocab_size"):
            yield name, parameter[: module.org_vocab_size]
        else:
            yield name, parameter
