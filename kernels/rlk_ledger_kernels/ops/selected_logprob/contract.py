"""The numeric contract of a selected log-probability: dtypes, temperature, ignored rows; the order is the `Schedule`.

One contract serves `selected_logprob`, `vocab_parallel_logprob` and `linear_logprob`: they are one operator over
logits that exist, that are cut over ranks, or that never exist at once.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from rlk_ledger_kernels.dtypes import DType, torch_dtype
from rlk_ledger_kernels.errors import ContractError
from rlk_ledger_kernels.schedule import Schedule


@dataclass(frozen=True)
class LogprobContract:
    """log softmax(z / temperature) at the selected token, z rounded to `logits` and then widened to float32.

    head: dtype the hidden state and the head's weight are rounded to before the product; None keeps them.
    ignore_index: a negative token id whose row scores exactly +0 and passes no gradient; None refuses such ids.
    """

    temperature: float = 1.0
    logits: DType = "float32"
    head: DType | None = None
    ignore_index: int | None = None
    schedule: Schedule = field(default_factory=Schedule)

    def __post_init__(self) -> None:
        """Refuse unknown names and temperatures at which the softmax is undefined."""
        torch_dtype(self.logits)
        if self.head is not None:
            torch_dtype(self.head)
        number = isinstance(self.temperature, int | float)
        if not number or not 0.0 < self.temperature < float("inf"):
            raise ContractError(f"logprob.temperature is {self.temperature!r}; choose a finite number above 0")
        if self.ignore_index is not None and self.ignore_index >= 0:
            raise ContractError(f"logprob.ignore_index is {self.ignore_index}; choose a negative id, such as -100")
