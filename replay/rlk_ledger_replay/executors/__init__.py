"""Who scores: this process, local worker processes, or Ray actors. The bits are the same whoever does.

Samples are dealt to lanes by what they are, never by who is free; a lane's worker that is lost is started again and
its unit retried; a unit that keeps failing is cut in halves, so that one bad sample costs itself alone.
"""

from rlk_ledger_replay.executors.choice import Executor, Plan, chosen

__all__ = ["Executor", "Plan", "chosen"]
