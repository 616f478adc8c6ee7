"""What scorers share that touches tensors: whether an engine holds the weights it was given, and a declared head."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from rlk_ledger_replay.checkpoint import load_checkpoint
from rlk_ledger_replay.scorers.protocol import Guard, Job
from rlk_ledger_sdk.weights import state_digest

GUARD = "weights.held"


def held_guard(held: Mapping[str, torch.Tensor], job: Job, where: str) -> Guard:
    """Compares the tensors an engine holds, by canonical (Hugging Face) name, with the checkpoint of its job.

    Held tensors are taken back to the checkpoint's dtype where that loses nothing (bf16 held as float32); where the
    engine itself rounded, the rounded checkpoint is what it should hold. where: how the tensors were read.
    """
    published = load_checkpoint(Path(job.folder)).tensors
    missing = sorted(set(published) - set(held))
    if missing:
        return Guard(
            GUARD, "unknown", f"{len(missing)} tensors cannot be read back, first {missing[0]}", {"how": where}
        )
    rounded = any(narrows(held[name].dtype, tensor.dtype) for name, tensor in published.items())
    wanted = {name: tensor.to(held[name].dtype) if rounded else tensor for name, tensor in published.items()}
    found = {name: held[name] if rounded else held[name].to(tensor.dtype) for name, tensor in published.items()}
    expected = job.weights if job.weights is not None and not rounded else digest(wanted)
    actual = digest(found)
    evidence = {"how": where, "digest": actual, "expected": expected, "tensors": len(published), "rounded": rounded}
    if actual == expected:
        return Guard(GUARD, "passed", f"the engine holds the checkpoint's {len(published)} tensors ({where})", evidence)
    unlike = [name for name in published if not torch.equal(found[name].cpu(), wanted[name])]
    reason = f"the engine holds other weights than the checkpoint: {len(unlike)} tensors differ ({where})"
    return Guard(GUARD, "failed", reason, evidence | {"first": unlike[0] if unlike else None})


def narrows(held: torch.dtype, published: torch.dtype) -> bool:
    """Whether a tensor published in one dtype loses bits when it is held in the other."""
    return held != published and torch.promote_types(held, published) != held


def head_product(
    hidden_NH: torch.Tensor, weight_VH: torch.Tensor, head: torch.dtype, logits: torch.dtype
) -> torch.Tensor:
    """The head's product in the declared dtypes: operands rounded to `head`, the product to `logits`; [..., V]."""
    wide = torch.promote_types(head, logits)
    operands = (one.to(head).to(wide) for one in (hidden_NH, weight_VH))
    return torch.nn.functional.linear(*operands).to(logits)


def digest(tensors: Mapping[str, torch.Tensor]) -> str:
    """`sum64x2` over tensors by canonical name."""
    found, _ = state_digest({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()})
    return found
