"""Which weights an engine is said to hold, since when, and which of them may have written its prefix cache."""


class Versions:
    """Generations of weights. A load starts one, a name labels it; a name without a load claims one.

    Owned by one Watch; not thread-safe on its own.
    """

    def __init__(self, initial: str | None) -> None:
        self._labels: list[str | None] = [initial]
        self._cache = 0
        self._seen_load = True
        self.unsettled = initial is not None
        """True while what the workers hold under the current label has not been recorded."""
        self.path: str | None = None
        """Where the current generation was loaded from, when the load said so."""

    @property
    def current(self) -> str | None:
        """The label of the weights in force; None when nobody named them."""
        return self._labels[-1]

    @property
    def cache_writer(self) -> str | None:
        """The oldest version that may have written what the prefix cache holds: that of its last reset."""
        return self._labels[self._cache]

    @property
    def caches_flushed(self) -> bool | None:
        """Whether the prefix cache was reset since the current generation began; None for the first one."""
        return None if len(self._labels) == 1 else self._cache == len(self._labels) - 1

    @property
    def must_settle_first(self) -> bool:
        """Whether a load that begins now would make the current generation unreadable before it was recorded."""
        return self.unsettled and self._seen_load and self.current is not None

    def loaded(self, path: str | None, *, finishing: bool = False) -> None:
        """Weights were loaded; a name given just before, that nothing has used yet, is theirs.

        finishing: the call ends a load whose parts were calls of their own; it begins none where one is going on.
        """
        if finishing and self.unsettled and self.current is None:
            return
        if self._seen_load or not self.unsettled:
            self._labels.append(None)
        self._seen_load, self.unsettled, self.path = True, True, path

    def named(self, version: str) -> None:
        """Someone said what the weights in force are called."""
        if self.current == version:
            return
        if self.current is None:
            self._labels[-1] = version
        else:
            self._labels.append(version)
            self._seen_load, self.path = False, None
        self.unsettled = True

    def flushed(self) -> None:
        """The prefix cache was reset."""
        self._cache = len(self._labels) - 1
