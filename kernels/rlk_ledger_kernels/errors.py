"""Errors of the kernels.

KernelError (ValueError)
  OperandError           an operand has the wrong shape, dtype or range
  ContractError          a contract or a schedule asks for something that cannot be kept
  ZeroActiveTokensError  a mean was asked for over no active token
InvarianceError (RuntimeError)
                         this machine does not keep the promise on the shapes in use, not even on one thread
"""

from __future__ import annotations


class KernelError(ValueError):
    """Base of the errors about what a caller passed."""


class OperandError(KernelError):
    """An operand has the wrong shape, dtype or range."""


class ContractError(KernelError):
    """A contract or a schedule asks for something that cannot be kept."""


class ZeroActiveTokensError(KernelError):
    """A mean was asked for over no active token."""


class InvarianceError(RuntimeError):
    """The probe found bits that depend on batch, position, tile or threads, also on one thread."""
