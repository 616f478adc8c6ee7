"""Native backends are admitted by bits, per input configuration with its contents, and by nothing they say."""

from collections.abc import Callable

import msgspec
import pytest
import torch

from rlk_ledger_kernels.descriptors import Backend
from rlk_ledger_kernels.native import Verdict, Verdicts, admit_native, configuration_key

NATIVE = Backend(name="vllm", bucket="opportunistic", devices=("cpu",))


def right(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x * y


def probe(
    run: Callable[..., object], *inputs: torch.Tensor, verdicts: Verdicts | None = None, configuration: str = ""
) -> Verdict:
    return admit_native(
        NATIVE, "product", inputs or operands(), run, right, configuration=configuration, verdicts=verdicts
    )


def operands() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.arange(12.0).reshape(3, 4), torch.full((3, 4), 0.5)


def off_by_one_bit(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    out = x * y
    out[1, 2] = torch.nextafter(out[1, 2], torch.tensor(torch.inf))
    return out


def negative_zero(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.where(x == 0, torch.tensor(-0.0), x * y)


def overwriting(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x.mul_(y)


def raising(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("no kernel image")


class Drifting:
    """Another result at every call, the first of them right."""

    def __init__(self) -> None:
        self.calls = -1

    def __call__(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x * y + self.calls


WRONG: dict[str, tuple[Callable[..., object], str]] = {
    "one bit": (off_by_one_bit, "differs from the deterministic backend at 1 of 12 elements, first at 6 (3.0000002"),
    "sign of zero": (negative_zero, "at 1 of 12 elements, first at 0 (-0.0, 0.0)"),
    "dtype": (lambda x, y: (x * y).double(), "output 0 is torch.float64 [3, 4]"),
    "shape": (lambda x, y: (x * y)[:2], "output 0 is torch.float32 [2, 4]"),
    "count": (lambda x, y: (x * y, x), "it returned 2 tensors, the deterministic backend 1"),
    "input": (overwriting, "it wrote to its input 0"),
    "raises": (raising, "it raised RuntimeError: no kernel image"),
    "drifts": (Drifting(), "differs from its own second run"),
}


@pytest.mark.parametrize("fault", WRONG)
def test_each_fault_is_refused_with_its_reason(fault: str) -> None:
    run, reason = WRONG[fault]
    verdict = probe(run)
    assert not verdict.admitted
    assert reason in verdict.reason


def test_equal_bits_are_admitted_and_nan_counts_by_its_bits() -> None:
    nan = torch.tensor([float("nan"), -0.0, float("inf")])
    assert probe(lambda x, y: x * y, nan, torch.ones(3)).admitted
    other = nan.view(torch.int32).clone()
    other[0] ^= 1
    assert not probe(lambda x, y: other.view(torch.float32), nan, torch.ones(3)).admitted


def test_the_callables_never_see_the_inputs_themselves() -> None:
    x, y = operands()
    kept = x.clone()
    assert not probe(overwriting, x, y).admitted
    assert torch.equal(x, kept)


def test_copies_have_the_strides_and_the_alignment_of_the_inputs() -> None:
    base = torch.arange(400.0)
    views = base[1:].as_strided((5, 7), (3, 11)), base[8:48].view(4, 10).t(), base[5:6].expand(6)
    seen: list[tuple[tuple[int, ...], int]] = []

    def looking(*inputs: torch.Tensor) -> torch.Tensor:
        seen.extend((one.stride(), one.data_ptr() % 64) for one in inputs)
        assert all(torch.equal(one, view) for one, view in zip(inputs, views))
        return inputs[0] + 0

    assert admit_native(NATIVE, "copy", views, looking, looking).admitted
    assert seen == [(one.stride(), one.data_ptr() % 64) for one in views] * 3


X, Y = torch.arange(16.0).reshape(4, 4), torch.ones(4, 4)
CHANGED = X.clone()
CHANGED[3, 3] = torch.nextafter(CHANGED[3, 3], torch.tensor(0.0))
ROOM = torch.zeros(65)
SHIFTED = ROOM[1:17].view(4, 4).copy_(X)

OTHER: dict[str, tuple[torch.Tensor, ...]] = {
    "one bit of contents": (CHANGED, Y),
    "dtype": (X.double(), Y),
    "dtype of the same bytes": (X.view(torch.int32), Y),
    "shape": (X.reshape(2, 8), Y.reshape(2, 8)),
    "strides": (X.t().contiguous().t(), Y),
    "alignment": (SHIFTED, Y),
    "order": (Y, X),
    "one input fewer": (X,),
}


@pytest.mark.parametrize("change", OTHER)
def test_whatever_may_change_bits_changes_the_key(change: str) -> None:
    assert configuration_key(NATIVE, "product", OTHER[change]) != configuration_key(NATIVE, "product", (X, Y))


def test_operator_backend_build_and_configuration_are_in_the_key() -> None:
    keys = {
        configuration_key(NATIVE, "product", (X, Y)),
        configuration_key(NATIVE, "sum", (X, Y)),
        configuration_key(msgspec.structs.replace(NATIVE, name="flashinfer"), "product", (X, Y)),
        configuration_key(msgspec.structs.replace(NATIVE, needs=("no-such-distribution",)), "product", (X, Y)),
        configuration_key(NATIVE, "product", (X, Y), "causal"),
    }
    assert len(keys) == 5
    assert configuration_key(NATIVE, "product", (X.clone(), Y.clone())) in keys, "equal inputs have one key"


def test_a_verdict_is_reused_for_the_same_contents_and_for_no_other() -> None:
    calls = []

    def counted(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return x * y

    verdicts = Verdicts()
    first = probe(counted, X, Y, verdicts=verdicts)
    assert probe(counted, X.clone(), Y.clone(), verdicts=verdicts) is first
    assert len(calls) == 2
    assert probe(counted, CHANGED, Y, verdicts=verdicts).key != first.key
    assert probe(counted, X, Y, verdicts=verdicts, configuration="causal").key != first.key
    assert (len(calls), len(verdicts)) == (6, 3)


def test_a_refusal_is_remembered_and_never_repaired_by_asking_again() -> None:
    verdicts = Verdicts()
    assert not probe(off_by_one_bit, X, Y, verdicts=verdicts).admitted
    assert not probe(right, X, Y, verdicts=verdicts).admitted


def test_the_cache_forgets_what_was_unused_for_longest() -> None:
    verdicts = Verdicts(limit=2)
    one, two, three = (torch.full((2,), float(value)) for value in (1, 2, 3))
    first = probe(right, one, one, verdicts=verdicts)
    probe(right, two, two, verdicts=verdicts)
    probe(right, one, one, verdicts=verdicts)
    probe(right, three, three, verdicts=verdicts)
    assert len(verdicts) == 2
    assert verdicts.get(first.key) is first
    assert verdicts.get(configuration_key(NATIVE, "product", (two, two))) is None
    verdicts.clear()
    assert len(verdicts) == 0


def test_an_error_of_the_deterministic_backend_is_the_callers() -> None:
    verdicts = Verdicts()
    with pytest.raises(RuntimeError, match="no kernel image"):
        admit_native(NATIVE, "product", (X, Y), right, raising, verdicts=verdicts)
    assert len(verdicts) == 0
    with pytest.raises(ValueError, match="no inputs"):
        admit_native(NATIVE, "product", (), right, right)


def test_empty_and_broadcast_inputs_have_keys_and_verdicts() -> None:
    empty = torch.zeros(0, 3)
    assert admit_native(
        NATIVE, "copy", [empty, torch.ones(1).expand(4)], lambda x, y: y * 2, lambda x, y: y + y
    ).admitted
