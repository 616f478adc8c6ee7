"""Replacing methods of one object, never of its class, and putting them back."""

from collections.abc import Callable
from typing import Any


class Wraps:
    """Methods replaced on instances; `undo` restores each to what it was."""

    def __init__(self) -> None:
        self._undo: list[tuple[Any, str, Any, bool]] = []

    def put(self, target: Any, name: str, make: Callable[[Any], Any]) -> Any:
        """Replaces `target.name` by `make(original)`; returns the original, or None when there is no such method."""
        original = getattr(target, name, None)
        if original is None:
            return None
        own = name in vars(target)
        self._undo.append((target, name, original, own))
        setattr(target, name, make(original))
        return original

    def undo(self) -> None:
        """Puts everything back, the last first."""
        while self._undo:
            target, name, original, own = self._undo.pop()
            if own:
                setattr(target, name, original)
            else:
                delattr(target, name)
