"""Padding of a rectangular batch: where the tokens of each row are."""

from __future__ import annotations

import torch

from rlk_ledger_kernels.errors import OperandError


def token_spans(ids_BT: torch.Tensor, mask_BT: torch.Tensor, starts: int) -> list[tuple[int, int]]:
    """[first, end) of the tokens in each row.

    ids_BT: [B, T]. mask_BT: [B, T], nonzero at tokens. starts: how many prompts were given.
    Raises OperandError when shapes differ, or when a row's tokens are no single run.
    """
    if ids_BT.dim() != 2 or mask_BT.shape != ids_BT.shape or starts != ids_BT.shape[0]:
        raise OperandError(
            f"ids are {tuple(ids_BT.shape)}, the mask {tuple(mask_BT.shape)} and {starts} starts were given; pass "
            "[batch, length] twice and one start per row"
        )
    spans = []
    for row, mask_T in enumerate(mask_BT != 0):
        at = mask_T.nonzero()[:, 0]
        if not at.numel() or int(at[-1] - at[0]) + 1 != at.numel():
            raise OperandError(f"row {row}: the mask marks {at.numel()} tokens that are not one run")
        spans.append((int(at[0]), int(at[-1]) + 1))
    return spans
