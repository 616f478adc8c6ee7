"""What this package lends the recorder: a shipper process and inline shipping (`rlk_ledger_sdk.hooks.Hooks`)."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rlk_ledger_sdk.config import Config


def start_shipper(config: "Config") -> None:
    """Starts the detached shipper process of `config.spool`; raises SpoolError when it cannot be started."""
    from rlk_ledger.spawn import start

    start(config.spool)


def ship_inline(config: "Config") -> None:
    """Ships what this process and dead writers left in `config.spool`; what went wrong is in each writer's status."""
    from rlk_ledger.service import ship_once

    ship_once(config.spool)
