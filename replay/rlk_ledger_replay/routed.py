"""Scores of a mixture-of-experts model with the routes they took."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from rlk_ledger_kernels.errors import OperandError
from rlk_ledger_replay.experts import Routes
from rlk_ledger_replay.session import Sample


@dataclass
class Routed:
    """What a routed pass gave. N = T - 1 inputs of a sample, L layers with experts, K experts of a token.

    scores: per sample float32 [T - start]. chosen: per sample int64 [N, L, K], what the routers chose given the hidden
    states they saw. covered: (input, layer) pairs with a recorded route; agreeing: those where the router chose the
    same experts in any order.
    """

    scores: list[torch.Tensor]
    chosen: list[torch.Tensor]
    covered: int
    agreeing: int

    def add(self, scores: list[torch.Tensor], routes: Routes, layers: Sequence[int], inputs: Sequence[int]) -> None:
        """Take in one group of samples; inputs: how many each fed."""
        self.scores += scores
        by_layer = [routes.chosen[layer][0].cpu() for layer in layers]
        self.chosen += list(torch.split(torch.stack(by_layer, dim=1), list(inputs)))
        self.covered += routes.covered
        self.agreeing += routes.agreeing


def joined(given: Sequence[torch.Tensor], group: Sequence[Sample], layers: Sequence[int]) -> dict[int, torch.Tensor]:
    """Routes of a group by layer, int64 [N, K] in packed order.

    Raises OperandError naming a sample that does not fit.
    """
    if len(given) != len(group):
        raise OperandError(f"routes are given for {len(given)} samples of {len(group)}; pass one tensor per sample")
    for index, (routes_NLK, sample) in enumerate(zip(given, group)):
        if routes_NLK.dim() != 3 or routes_NLK.shape[:2] != (sample.inputs, len(layers)):
            raise OperandError(
                f"routes of sample {index} are {tuple(routes_NLK.shape)}; pass [{sample.inputs} inputs, {len(layers)} "
                "layers with experts, experts of a token]"
            )
    whole_NLK = torch.cat([routes_NLK.to(torch.int64) for routes_NLK in given])
    return {layer: whole_NLK[:, at] for at, layer in enumerate(layers)}
