"""The door through which a higher layer lends the recorder a shipper."""

from typing import Protocol

from rlk_ledger_sdk.config import Config


class Hooks(Protocol):
    """What the recorder needs of a shipper; a module with these two functions will do."""

    def start_shipper(self, config: Config) -> None:
        """Starts the shipper process of `config.spool`; returns at once."""

    def ship_inline(self, config: Config) -> None:
        """Ships everything in `config.spool` now, in this process."""


_installed: Hooks | None = None


def install(hooks: Hooks | None) -> None:
    """Lends the recorder a shipper (None takes it back); without one, events stay in the spool."""
    global _installed
    _installed = hooks


def installed() -> Hooks | None:
    """The hooks in force."""
    return _installed
