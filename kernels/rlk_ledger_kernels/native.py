"""Admission of backends that others wrote: a bitwise probe on the very inputs, never a claim taken on trust.

A native kernel (transformer_engine, flashinfer, vllm) may choose its algorithm by shape, stride, alignment or value, so
a verdict holds for one backend, build and input configuration *including its contents*, and for nothing else.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TypeAlias

import msgspec
import torch

from rlk_ledger_kernels.bits import bits, same_bits
from rlk_ledger_kernels.descriptors import Backend
from rlk_ledger_kernels.fingerprint import build_fingerprint

Outputs: TypeAlias = "torch.Tensor | Sequence[torch.Tensor]"
Run: TypeAlias = "Callable[..., Outputs]"

ALIGNMENT = 64
"""Bytes. Vectorised loads look at most this far; where an operand starts within it is part of its configuration."""


class Verdict(msgspec.Struct, frozen=True):
    """Whether a native backend may run on one input configuration. key: what it was judged on, as `sha256:`."""

    operator: str
    backend: str
    admitted: bool
    reason: str
    key: str


class Verdicts:
    """The last `limit` verdicts of one session, by key; holds no tensor. Not shared between sessions."""

    def __init__(self, limit: int = 256) -> None:
        """Start empty; `limit` is at least 1."""
        self._limit = max(1, limit)
        self._by_key: OrderedDict[str, Verdict] = OrderedDict()

    def __len__(self) -> int:
        """How many verdicts are kept."""
        return len(self._by_key)

    def get(self, key: str) -> Verdict | None:
        """The verdict on exactly this key; it becomes the one used last."""
        found = self._by_key.get(key)
        if found is not None:
            self._by_key.move_to_end(key)
        return found

    def keep(self, verdict: Verdict) -> None:
        """Remember a verdict and forget the one unused for longest when there are too many."""
        self._by_key[verdict.key] = verdict
        while len(self._by_key) > self._limit:
            self._by_key.popitem(last=False)

    def clear(self) -> None:
        """Forget all."""
        self._by_key.clear()


def admit_native(
    backend: Backend,
    operator: str,
    inputs: Sequence[torch.Tensor],
    run: Run,
    reference_run: Run,
    *,
    configuration: str = "",
    verdicts: Verdicts | None = None,
) -> Verdict:
    """Probe a native backend on `inputs`: it must give the bits of `reference_run`, twice, and leave inputs alone.

    inputs: all tensors the operator reads, at least one, on one device; neither callable sees them, only copies of the
    same strides and alignment. run, reference_run: called as f(*inputs), each returns a tensor or several.
    configuration: what is no tensor and still matters (scale, causal, window), as text. verdicts: where verdicts are
    kept. An exception of `run` is a refusal with its text; one of `reference_run` is the caller's and is raised.
    """
    key = configuration_key(backend, operator, inputs, configuration)
    known = verdicts.get(key) if verdicts is not None else None
    if known is not None:
        return known
    reason = _objection(inputs, run, reference_run)
    verdict = Verdict(operator, backend.name, reason is None, reason or "bit for bit the deterministic backend", key)
    if verdicts is not None:
        verdicts.keep(verdict)
    return verdict


def configuration_key(backend: Backend, operator: str, inputs: Sequence[torch.Tensor], configuration: str = "") -> str:
    """`sha256:` over backend, operator, build, configuration and of each input dtype, shape, strides, device, bytes."""
    if not inputs:
        raise ValueError("no inputs: pass every tensor the operator reads.")
    build = build_fingerprint(backend.needs, inputs[0].device.type)
    digest = hashlib.sha256()
    for text in (operator, backend.name, build, configuration, str(len(inputs))):
        digest.update(f"{len(text)}:{text}".encode())
    for one in inputs:
        layout = (one.dtype, tuple(one.shape), one.stride(), str(one.device), one.data_ptr() % ALIGNMENT)
        digest.update(repr(layout).encode())
        digest.update(_content(one))
    return f"sha256:{digest.hexdigest()}"


def _objection(inputs: Sequence[torch.Tensor], run: Run, reference_run: Run) -> str | None:
    """Why the backend is refused on these inputs, or None."""
    expected = _outputs(reference_run(*(_copy(one) for one in inputs)))
    operands = [_copy(one) for one in inputs]
    try:
        got = [one.clone() for one in _outputs(run(*operands))]
        again = _outputs(run(*(_copy(one) for one in inputs)))
    except Exception as error:  # another project's kernel: whatever it raises refuses this configuration only
        return f"it raised {type(error).__name__}: {error}"
    for index, (one, before) in enumerate(zip(operands, inputs)):
        if _content(one) != _content(before):
            return f"it wrote to its input {index}"
    return _difference(got, again, "its own second run") or _difference(got, expected, "the deterministic backend")


def _difference(got: Sequence[torch.Tensor], expected: Sequence[torch.Tensor], other: str) -> str | None:
    """Where two results first differ, in words."""
    if len(got) != len(expected):
        return f"it returned {len(got)} tensors, {other} {len(expected)}"
    for index, (one, wanted) in enumerate(zip(got, expected)):
        if one.shape != wanted.shape or one.dtype != wanted.dtype:
            return (
                f"output {index} is {one.dtype} {list(one.shape)}, of {other} it is {wanted.dtype} {list(wanted.shape)}"
            )
        if not same_bits(one, wanted):
            different = (bits(one).flatten() != bits(wanted).flatten()).nonzero()
            first = int(different[0, 0])
            values = f"{one.flatten()[first].item()!r}, {wanted.flatten()[first].item()!r}"
            return (
                f"output {index} differs from {other} at {len(different)} of {one.numel()} elements, "
                f"first at {first} ({values})"
            )
    return None


def _outputs(result: Outputs) -> list[torch.Tensor]:
    return [result] if isinstance(result, torch.Tensor) else list(result)


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of the same bytes, strides and alignment in storage of its own."""
    source = tensor.detach()
    if source.numel() == 0:
        return source.clone()
    span = 1 + sum((size - 1) * stride for size, stride in zip(source.shape, source.stride()))
    base = source.new_empty(span + ALIGNMENT // source.element_size() + 1)
    shift = (source.data_ptr() - base.data_ptr()) % ALIGNMENT // source.element_size()
    base[shift : shift + span].copy_(source.as_strided((span,), (1,)))
    return base.as_strided(source.shape, source.stride(), shift)


def _content(tensor: torch.Tensor) -> bytes:
    """SHA-256 of a tensor's elements in index order."""
    plain = tensor.detach().contiguous().cpu()
    size = plain.numel() * plain.element_size()
    return hashlib.sha256((ctypes.c_char * size).from_address(plain.data_ptr()) if size else b"").digest()
