"""Cases of vocab_parallel_logprob: shards of unequal length, one of them empty, merged in one process."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from types import ModuleType
from typing import Any

import torch

from rlk_ledger_kernels.dtypes import DType
from rlk_ledger_kernels.ops.selected_logprob import cases as whole_cases
from rlk_ledger_kernels.ops.selected_logprob import reference as whole
from rlk_ledger_kernels.ops.vocab_parallel_logprob.contract import LogprobContract
from rlk_ledger_kernels.schedule import Schedule
from rlk_ledger_kernels.suite.case import Case, RowCase, Rows, Wrong

_SHAPES = {"small": ((131, 301, 112, 4),), "large": ((257, 151936, 1187, 8),)}
"""(rows, vocabulary, tile, ranks)."""


def cases(size: str = "small") -> list[Case]:
    """Every shape in float32 and bfloat16."""
    return [_case(*shape, dtype) for shape in _SHAPES[size] for dtype in whole_cases.DTYPES[size]]


def wrong() -> list[Wrong]:
    """The mean of the ranks' log-sum-exps instead of the log-sum-exp of all."""
    right = _case(131, 301, 112, 4, "float32")

    def run(module: ModuleType, these: Rows) -> torch.Tensor:
        contract = _contract("float32", 112)
        parts = [part for part in _parts(contract, 301, 4, module, these) if part.end > part.first]
        lse_RN = torch.stack([(p.top_NT / 0.7 + p.sum_NT.log()).logsumexp(1) for p in parts])
        chosen_N = torch.stack([p.chosen_N for p in parts]).sum(0) / 0.7
        return torch.where(parts[0].ignored_N, 0.0, chosen_N - lse_RN.mean(0))

    return [Wrong("accuracy", "the mean of the ranks' log-sum-exps", replace(right, run=run), right)]


def shards(vocabulary: int, columns: int, tile: int, ranks: int) -> list[tuple[int, int]]:
    """[start, end) of each rank's columns: whole tiles, dealt as evenly as they go; the last rank holds the padding."""
    tiles = -(-vocabulary // tile)
    per = -(-tiles // ranks) * tile
    return [(min(r * per, columns), columns if r == ranks - 1 else min((r + 1) * per, columns)) for r in range(ranks)]


def _contract(dtype: str, tile: int) -> LogprobContract:
    logits: DType = "bfloat16" if dtype == "bfloat16" else "float32"
    return LogprobContract(temperature=0.7, logits=logits, ignore_index=-100, schedule=Schedule(vocab_tile=tile))


def _parts(contract: LogprobContract, vocabulary: int, ranks: int, module: ModuleType, these: Rows) -> list[Any]:
    logits_NV, tokens_N = these
    cuts = shards(vocabulary, logits_NV.shape[1], contract.schedule.vocab_tile, ranks)
    return [module.shard_statistics(logits_NV[:, a:b], a, vocabulary, tokens_N, contract) for a, b in cuts]


def _case(rows: int, vocabulary: int, tile: int, ranks: int, dtype: str) -> RowCase:
    contract = _contract(dtype, tile)

    def expected(these: Rows) -> torch.Tensor:
        return whole.selected_logprob(these[0], these[1], contract, vocabulary)

    def gradient(module: ModuleType, these: Rows) -> torch.Tensor:
        logits_NV, tokens_N = these
        normal = module.normaliser(_parts(contract, vocabulary, ranks, module, these), contract)
        grad_N = torch.full_like(tokens_N, whole_cases.COTANGENT, dtype=torch.float32)
        cuts = shards(vocabulary, logits_NV.shape[1], tile, ranks)
        made = [
            module.shard_backward(grad_N, logits_NV[:, a:b], a, vocabulary, tokens_N, normal, contract) for a, b in cuts
        ]
        return torch.cat(made, dim=1)

    return RowCase(
        "vocab_parallel_logprob",
        f"{rows} x {vocabulary}, tile {tile}, {ranks} ranks, {dtype}",
        dtype,
        whole_cases.operands(rows, vocabulary, dtype),
        partial(_run, contract, vocabulary, ranks),
        expected,
        gradient,
    )


def _run(contract: LogprobContract, vocabulary: int, ranks: int, module: ModuleType, these: Rows) -> torch.Tensor:
    result: torch.Tensor = module.merge_statistics(_parts(contract, vocabulary, ranks, module, these), contract)
    return result
