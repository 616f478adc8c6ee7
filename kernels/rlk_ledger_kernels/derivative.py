"""The one rule of all backward passes: there is a first derivative and no second."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import torch

from rlk_ledger_kernels.errors import ContractError

Gradients = TypeVar("Gradients")


def first_only(backward: Callable[..., Gradients]) -> Callable[..., Gradients]:
    """Make a `backward` refuse `create_graph=True`, under which its result would count as a constant.

    Calling it raises ContractError then.
    """

    @wraps(backward)
    def checked(ctx: Any, *grads: Any) -> Gradients:
        if torch.is_grad_enabled():
            operator = backward.__module__.split(".")[-2]
            raise ContractError(f"{operator}: there is no second derivative; differentiate without create_graph=True")
        return backward(ctx, *grads)

    return checked
