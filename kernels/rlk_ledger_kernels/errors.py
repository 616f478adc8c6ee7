"""Errors of the kernels.

KernelError (ValueError)
  OperandError           an operand has the wrong shape, dtype or range
  ContractError          a contract or a schedule asks for something that cannot be kept
    DecisionError        no backend may run as asked, or another one ran; carries the reason code
  ZeroActiveTokensError  a mean was asked for over no active token
BackendError (RuntimeError)
                         a backend cannot run here: its distribution, its build or its device is missing
InvarianceError (RuntimeError)
                         this machine does not keep the promise on the shapes in use, not even on one thread
"""

from __future__ import annotations

from rlk_ledger_schemas.events import Rejected
from rlk_ledger_schemas.modes import REASONS


class KernelError(ValueError):
    """Base of the errors about what a caller passed."""


class OperandError(KernelError):
    """An operand has the wrong shape, dtype or range."""


class ContractError(KernelError):
    """A contract or a schedule asks for something that cannot be kept."""


class DecisionError(ContractError):
    """No backend may run as asked, or another one ran than was decided.

    code: of `modes.REASONS`. rejected: every candidate with its own reason.
    """

    def __init__(self, code: str, what: str, rejected: tuple[Rejected, ...] = ()) -> None:
        """`what` is a sentence without its full stop; the code's next step is added."""
        self.code = code
        self.rejected = rejected
        self._made_of = (code, what, rejected)
        each = "; ".join(f"{one.backend}: {one.reason}" for one in rejected)
        super().__init__(f"{what}{f' ({each})' if each else ''} [{code}]. {REASONS[code].next_step}")

    def __reduce__(self) -> tuple[type[DecisionError], tuple[str, str, tuple[Rejected, ...]]]:
        """Crosses process boundaries, as worker errors do."""
        return type(self), self._made_of


class ZeroActiveTokensError(KernelError):
    """A mean was asked for over no active token."""


class BackendError(RuntimeError):
    """A backend cannot run here; the message says what would enable it."""


class InvarianceError(RuntimeError):
    """The probe found bits that depend on batch, position, tile or threads, also on one thread."""
