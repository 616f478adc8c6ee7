"""Padded and packed batches as whole sequences: which tokens are there, which of them form a sequence.

Legend: B rows of a batch, T tokens of a row, S sequences, N tokens that are there, D head_dim.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rlk_ledger_kernels.errors import OperandError


@dataclass(frozen=True)
class PackedRows:
    """The tokens of a batch that are no padding. at_N: their places in the flattened [B * T]; lengths: of sequences."""

    at_N: torch.Tensor
    lengths: tuple[int, ...]


def packed_rows(mask_BT: torch.Tensor | None, positions_BT: torch.Tensor) -> PackedRows:
    """Find the sequences of a batch.

    mask_BT: true where there is a token; None is everywhere. positions_BT: a sequence ends where the next token's
    position is not the next one, or with the row. Raises OperandError for a batch of nothing but padding, and for a
    sequence that does not start at position 0.
    """
    rows, tokens = positions_BT.shape
    device = positions_BT.device
    there_BT = torch.ones((rows, tokens), dtype=torch.bool, device=device) if mask_BT is None else mask_BT.bool()
    at_N = there_BT.flatten().nonzero()[:, 0]
    if not at_N.numel():
        raise OperandError("hugging_face: the attention mask holds no token; leave such a batch out")
    position_N, row_N = positions_BT.flatten()[at_N], at_N // tokens
    starts_N = torch.ones(len(at_N), dtype=torch.bool, device=device)
    starts_N[1:] = (row_N[1:] != row_N[:-1]) | (position_N[1:] != position_N[:-1] + 1)
    first_S = starts_N.nonzero()[:, 0]
    if bool(position_N[first_S].any()):
        raise OperandError(
            "hugging_face: a sequence starts at a position other than 0; pass position_ids that count its own tokens"
        )
    ends_S = torch.cat((first_S[1:], first_S.new_tensor([len(at_N)])))
    return PackedRows(at_N, tuple((ends_S - first_S).tolist()))


def own_positions(mask_BT: torch.Tensor) -> torch.Tensor:
    """Positions that count a row's own tokens, whatever padding lies before them; 0 at padding. int64 [B, T]."""
    mask = mask_BT.to(torch.int64)
    return (mask.cumsum(-1) - 1).clamp(min=0) * mask
