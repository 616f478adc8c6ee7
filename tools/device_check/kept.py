"""Large operands cross to the device once: the cases move their weights at every call, which is right and slow."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_LEAST_BYTES = 16 << 20
_MOST_BYTES = 16 << 30


class Kept(TorchFunctionMode):
    """Context in which `weight.to(device)` of a large CPU tensor returns the copy made before, until it is written to.

    Owns the copies, up to 16 GiB of them; larger sums are moved every time. Copies are for reading: operators that
    write to their operands would be caught by the suites, which compare one run with the next.
    """

    def __init__(self) -> None:
        """Keep nothing yet."""
        super().__init__()
        self._kept: dict[int, tuple[torch.Tensor, int, torch.Tensor]] = {}
        self._bytes = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Answer a plain move from what is kept."""
        plain = func is torch.Tensor.to and len(args) == 2 and not kwargs and isinstance(args[1], torch.device | str)
        if not plain or args[0].device.type != "cpu" or torch.device(args[1]).type == "cpu":
            return func(*args, **(kwargs or {}))
        source = args[0]
        known = self._kept.get(id(source))
        if known is not None and known[0] is source and known[1] == source._version:
            return known[2]
        copy = func(*args)
        size = source.numel() * source.element_size()
        if size >= _LEAST_BYTES and self._bytes + size <= _MOST_BYTES:
            self._kept[id(source)] = (source, source._version, copy)
            self._bytes += size
        return copy
