"""Claims: masked means divide once; the probe refuses what does not repeat; the registry never falls back in
silence; contracts and schedules refuse what no backend could keep."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from rlk_ledger_kernels import probe
from rlk_ledger_kernels.errors import ContractError, InvarianceError, OperandError, ZeroActiveTokensError
from rlk_ledger_kernels.ops.linear.contract import LinearContract
from rlk_ledger_kernels.ops.masked_mean import reference as masked_mean_reference
from rlk_ledger_kernels.ops.masked_mean.torch import masked_mean, masked_sum
from rlk_ledger_kernels.ops.rms_norm.contract import RmsNormContract
from rlk_ledger_kernels.ops.selected_logprob.contract import LogprobContract
from rlk_ledger_kernels.probe import ShapesInUse, admit, using_threads
from rlk_ledger_kernels.schedule import Schedule, placebo_schedules

SHAPES = ShapesInUse(products=frozenset({(384, 0, 96, 128), (128, 0, 128, 272)}), heads=(2, 32, 48))


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.floats(-50, 0), st.booleans()), min_size=1, max_size=80), st.integers(0, 40))
def test_masked_mean_equals_fsum_and_ignores_padding(pairs: list[tuple[float, bool]], padding: int) -> None:
    values = torch.tensor([p[0] for p in pairs], dtype=torch.float32)
    mask = torch.tensor([p[1] for p in pairs])
    if not mask.any():
        with pytest.raises(ZeroActiveTokensError):
            masked_mean(values, mask)
        return
    expected = math.fsum(values[mask].tolist()) / int(mask.sum())
    assert masked_mean(values, mask) == pytest.approx(expected, rel=1e-12, abs=1e-300)
    assert float(masked_mean_reference.masked_mean(values, mask)) == pytest.approx(expected, rel=1e-4, abs=1e-6)
    padded = torch.cat((values, torch.full((padding,), float("nan"))))
    padded_mask = torch.cat((mask, torch.zeros(padding, dtype=torch.bool)))
    assert masked_mean(padded, padded_mask) == masked_mean(values, mask)


def test_masked_mean_is_not_a_mean_of_means() -> None:
    values = torch.tensor([[1.0, 1.0, 1.0, 1.0], [5.0, 0.0, 0.0, 0.0]])
    mask = torch.tensor([[1, 1, 1, 1], [1, 0, 0, 0]])
    parts = [masked_sum(values[i], mask[i]) for i in range(2)]
    assert masked_mean(values, mask) == 9 / 5
    assert sum(p.total for p in parts) / sum(p.active for p in parts) == 9 / 5
    assert sum(p.mean for p in parts) / 2 != 9 / 5
    with pytest.raises(OperandError, match="mask is"):
        masked_sum(values, mask[0])


def test_the_probe_admits_this_machine_on_one_and_two_threads() -> None:
    for threads in (1, 2):
        with using_threads(threads):
            admission = admit(SHAPES, Schedule())
            assert admission.threads <= threads
            assert str(admission.threads) in admission.reason


def test_the_probe_gives_up_threads_before_row_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    real = probe.contract_rows

    def differs_on_two_threads(x: torch.Tensor, leaves: object, tiles: tuple[int, ...]) -> torch.Tensor:
        return real(x, leaves, tiles) + (torch.get_num_threads() - 1) * 1e-6

    monkeypatch.setattr(probe, "contract_rows", differs_on_two_threads)
    monkeypatch.setattr(probe, "_verdicts", {})
    with using_threads(2):
        admission = admit(SHAPES, Schedule())
    assert admission.threads == 1
    assert admission.row_tiles == Schedule().row_tiles
    assert "is not repeatable on 2 thread(s)" in admission.reason


def test_the_probe_gives_up_row_counts_and_then_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    real = probe.contract_rows
    monkeypatch.setattr(probe, "_verdicts", {})

    def differs_by_tile(x: torch.Tensor, leaves: object, tiles: tuple[int, ...]) -> torch.Tensor:
        return real(x, leaves, tiles) + tiles[0] * 1e-6

    monkeypatch.setattr(probe, "contract_rows", differs_by_tile)
    assert admit(SHAPES, Schedule()).row_tiles == (16,)

    counter = itertools.count()

    def never_twice_the_same(x: torch.Tensor, leaves: object, tiles: tuple[int, ...]) -> torch.Tensor:
        return real(x, leaves, tiles) + next(counter) * 1e-3

    monkeypatch.setattr(probe, "contract_rows", never_twice_the_same)
    monkeypatch.setattr(probe, "_verdicts", {})
    with pytest.raises(InvarianceError, match="score on another machine or build"):
        admit(SHAPES, Schedule())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Schedule(k_leaf=0), "k_leaf is 0"),
        (lambda: Schedule(k_leaf=4097), "k_leaf is 4097"),
        (lambda: Schedule(kv_block=48), "kv_block is 48"),
        (lambda: Schedule(row_tiles=(16, 40)), "row_tiles"),
        (lambda: Schedule(row_tiles=()), "row_tiles"),
        (lambda: Schedule(kv_order="sideways"), "kv_order is 'sideways'"),
        (lambda: placebo_schedules(11), "ask for 1..10"),
        (lambda: LinearContract(output="float8"), "dtype 'float8' has no contract"),
        (lambda: RmsNormContract(rounding_order="both"), "rounding_order is 'both'"),
        (lambda: LogprobContract(temperature=0.0), "temperature is 0.0"),
        (lambda: LogprobContract(temperature=float("nan")), "temperature is nan"),
    ],
)
def test_contracts_refuse_what_cannot_be_kept(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ContractError, match=message):
        make()


def test_placebo_schedules_differ_from_the_default_and_from_each_other() -> None:
    placebos = placebo_schedules(10)
    assert len({Schedule(), *placebos}) == 11
    assert {p.row_tiles for p in placebos} == {Schedule().row_tiles}
