"""Bit patterns of tensors: the only equality that counts here; `+0` and `-0` differ, NaN payloads count."""

from __future__ import annotations

import torch

_INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits(x: torch.Tensor) -> torch.Tensor:
    """The same memory as integers, so that comparison is bitwise."""
    return x.contiguous().view(_INTEGER[x.element_size()])


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors have one shape, one dtype and one bit pattern."""
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(bits(a), bits(b))
