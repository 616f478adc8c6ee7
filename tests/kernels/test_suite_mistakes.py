"""Claim: every suite can fail. Each wrong operator is caught by its suite, and its right twin is not accused."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch

from rlk_ledger_kernels.errors import InvarianceError
from rlk_ledger_kernels.suite import accuracy, catalogue, invariance, parity
from rlk_ledger_kernels.suite.case import RowCase, Rows, Wrong
from rlk_ledger_kernels.suite.certificate import Scope, _shipped
from rlk_ledger_kernels.suite.mistakes import mistakes
from rlk_ledger_kernels.suite.proof import prove

SHIPPED = list(_shipped(Scope()))
NOTHING = ModuleType("nothing")


@pytest.mark.parametrize(("wrong", "module"), SHIPPED, ids=[one.mistake for one, _ in SHIPPED])
def test_a_wrong_operator_is_caught_and_its_right_twin_is_not(wrong: Wrong, module: ModuleType) -> None:
    proof = prove(wrong, "cpu", module)
    assert proof.caught is not None
    assert proof.accused is None


def test_the_mistakes_people_make_are_among_them() -> None:
    told = " ".join(f"{wrong.suite}: {wrong.mistake}" for wrong in mistakes())
    for named in (
        "split-K by shape",
        "batch-dependent tile",
        "mean of rank LSEs",
        "mask by arithmetic",
        "block chosen by length",
        "cache that forgets a prefix",
        "padding and neighbours leak",
        "bf16 accumulation",
        "temperature",
        "strides ignored",
        "an operand is written to",
        "from 512 rows on",
        "NaN swallowed",
        "overflow without a maximum",
    ):
        assert named in told
    assert {wrong.suite for wrong in mistakes()} == {"invariance", "accuracy", "parity"}
    assert all(wrong.right is not None for wrong in mistakes())


@pytest.mark.parametrize(
    ("mistake", "transform"),
    [
        ("split-K by shape", "T1"),
        ("from 512 rows on", "T1"),
        ("strides ignored", "T2"),
        ("an operand is written to", "its own run"),
        ("NaN comes through", "T3"),
        ("mask by arithmetic", "T4"),
        ("block chosen by length", "T5"),
        ("forgets a prefix", "T7"),
    ],
)
def test_the_transform_that_names_the_mistake_catches_it(mistake: str, transform: str) -> None:
    (wrong,) = [one for one in mistakes() if mistake in one.mistake]
    found = invariance.check(wrong.case, NOTHING)
    assert found is not None
    assert found.transform.startswith(transform)


def rows_case(run: object, dtype: str = "float32", reference: object = None) -> RowCase:
    x = torch.randn((130, 4), generator=torch.Generator().manual_seed(0))
    right = reference or (lambda rows: rows[0])
    return RowCase("linear", "made up", dtype, (x,), run, right)  # type: ignore[arg-type]


def test_the_first_mismatch_is_told_in_the_index_order_of_the_case() -> None:
    def shifts(_: ModuleType, rows: Rows) -> torch.Tensor:
        """Wrong: the last two rows of a call are rounded otherwise."""
        out = rows[0].clone()
        if len(out) > 130:
            out[-2:] += 1.0
        return out

    found = invariance.check(rows_case(shifts), NOTHING)
    assert found is not None
    assert (found.transform, found.row, found.element) == ("T4 1 rows of nan on the left", 128, 0)
    assert found.got == pytest.approx(found.expected + 1.0)
    assert "linear (made up, forward) changed under T4" in str(found)


@pytest.mark.parametrize("change", [lambda x: x * -1.0 + 0.0, lambda x: torch.full_like(x, float("nan"))])
def test_signs_of_zero_and_bits_of_nan_count(change: object) -> None:
    """Numbers that compare equal, or never do, are compared as bits."""

    def zeros(_: ModuleType, rows: Rows) -> torch.Tensor:
        zero = torch.zeros_like(rows[0])
        return -zero if len(rows[0]) < 5 else zero

    def nans(_: ModuleType, rows: Rows) -> torch.Tensor:
        pattern = 0x7FC00001 if len(rows[0]) < 5 else 0x7FC00000
        return torch.full(rows[0].shape, pattern, dtype=torch.int32).view(torch.float32)

    for run in (zeros, nans):
        found = invariance.check(rows_case(run), NOTHING)
        assert found is not None
        assert found.transform == "T1 population 1"


def test_a_kernel_that_depends_on_the_thread_count_is_found() -> None:
    def threaded(_: ModuleType, rows: Rows) -> torch.Tensor:
        return rows[0] * torch.get_num_threads()

    assert invariance.check(rows_case(threaded), NOTHING) is None
    assert invariance.check(rows_case(threaded), NOTHING, threads=2) is not None


def test_parity_with_a_backend_that_is_not_invariant_is_refused() -> None:
    variant, steady = ModuleType("variant"), ModuleType("steady")

    def run(module: ModuleType, rows: Rows) -> torch.Tensor:
        return rows[0] * (len(rows[0]) if module is variant else 1.0)

    with pytest.raises(InvarianceError, match="no parity with variant: it fails invariance alone"):
        parity.check(rows_case(run), steady, variant)
    assert parity.check(rows_case(run), steady, steady) is None


def test_parity_tells_equal_bits_from_equal_numbers() -> None:
    near, right = ModuleType("near"), ModuleType("right")

    def run(module: ModuleType, rows: Rows) -> torch.Tensor:
        return rows[0] * (1.0 + 2.0**-23) if module is near else rows[0]

    case = rows_case(run)
    found = parity.compare(case, near, case, right)
    assert not found.bitwise
    assert 0.0 < found.worst.share < 1.0
    assert parity.compare(case, right, case, right).bitwise


@pytest.mark.parametrize(
    ("dtype", "got", "expected", "share"),
    [
        ("float32", float("nan"), 1.0, float("inf")),
        ("float32", 1.0, float("nan"), float("inf")),
        ("float32", float("inf"), float("-inf"), float("inf")),
        ("float32", float("nan"), float("nan"), 0.0),
        ("float32", float("-inf"), float("-inf"), 0.0),
        ("float16", float("inf"), 70000.0, 0.0),  # what float16 cannot hold rounds to infinity
        ("float16", 60000.0, 70000.0, float("inf")),
    ],
)
def test_nan_and_infinities_are_classes(dtype: str, got: float, expected: float, share: float) -> None:
    torch_dtype = {"float32": torch.float32, "float16": torch.float16}[dtype]

    def run(_: ModuleType, rows: Rows) -> torch.Tensor:
        return torch.full((130, 1), got, dtype=torch_dtype)

    case = rows_case(run, dtype, lambda rows: torch.full((130, 1), expected))
    assert accuracy.measure(case, NOTHING).share == share


def test_a_case_without_a_tolerance_fails_closed() -> None:
    with pytest.raises(ValueError, match="no tolerance for"):
        accuracy.measure(rows_case(lambda _, rows: rows[0], "float8"), NOTHING)


def test_own_mistakes_of_operators_are_part_of_the_proof() -> None:
    own = [wrong for operator in catalogue.operators().values() for wrong in catalogue.own_mistakes(operator)]
    assert len(SHIPPED) == len(mistakes()) + len(own)
