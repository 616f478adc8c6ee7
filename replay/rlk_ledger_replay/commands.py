"""The commands this package adds to `rlk-ledger`, found by entry point; each lives in its own module."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rlk_ledger_replay.replay_command import replay

if TYPE_CHECKING:
    from rlk_ledger_replay.demo_command import demo
    from rlk_ledger_replay.report_command import report

__all__ = ["demo", "replay", "report"]


def __getattr__(name: str) -> Any:
    """Loads `demo` and `report` when they are asked for, so that one of them failing to import spares the others."""
    if name == "demo":
        from rlk_ledger_replay.demo_command import demo

        return demo
    if name == "report":
        from rlk_ledger_replay.report_command import report

        return report
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
