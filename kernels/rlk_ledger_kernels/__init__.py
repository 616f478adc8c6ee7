"""Deterministic operators with explicit numeric contracts; see kernels/README.md."""

from rlk_ledger_kernels.schedule import Schedule, placebo_schedules

__all__ = ["Schedule", "placebo_schedules"]
