"""The accuracy suite: a candidate in its execution dtype against the float32 reference fed the same inputs.

`|candidate - reference| <= atol + rtol |reference|`, looked up by (op class, dtype) in the versioned table; a missing
entry raises. NaN and infinities are classes: both sides must have the same one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import ModuleType

import torch

from rlk_ledger_kernels.errors import OperandError
from rlk_ledger_kernels.suite.case import Case, MaskedCase, RowCase, Rows, SequenceCase, copied, moved
from rlk_ledger_kernels.suite.catalogue import operators
from rlk_ledger_kernels.suite.layouts import lengths_of, whole
from rlk_ledger_kernels.suite.quiet import quiet
from rlk_ledger_schemas.tolerances import Tolerance, tolerance

_LARGE = 1e4
"""Makes exp() overflow and float16 does not."""


@dataclass(frozen=True)
class Excess:
    """The worst element of a comparison. share: its distance as a share of the tolerance there; above 1 it fails.

    row: of the case (of all sequences one after the other), in index order the first of the worst. A share of infinity
    is another class: NaN or an infinity on one side alone.
    """

    operator: str
    case: str
    share: float
    row: int
    element: int
    expected: float
    got: float

    def __str__(self) -> str:
        """One sentence."""
        far = "is of another class" if self.share == float("inf") else f"is {self.share:.3g} tolerances away"
        return (
            f"{self.operator} ({self.case}): row {self.row}, element {self.element} {far}: {self.got!r}, expected "
            f"{self.expected!r}"
        )


def check(case: Case, module: ModuleType, device: str = "cpu") -> Excess | None:
    """The worst element where the candidate leaves its tolerance, or None. Raises UsageError without a tolerance."""
    worst = measure(case, module, device)
    return worst if worst.share > 1.0 else classes(case, module, device)


def classes(case: Case, module: ModuleType, device: str = "cpu") -> Excess | None:
    """Where rows of NaN, infinities, -0 and large numbers come out as another class than the reference's, or None."""
    if not isinstance(case, RowCase):
        return None
    found = measure(
        replace(case, name=f"{case.name}, with NaN and infinities", rows=_planted(case.rows)), module, device
    )
    return found if found.share == float("inf") else None


def _planted(rows: Rows) -> Rows:
    """Five rows of the case that hold, in turn, NaN, +inf, -inf, nothing but -0, and large numbers."""
    at_N = torch.arange(5, device=rows[0].device) % len(rows[0])
    out = []
    for operand in rows:
        few = operand[at_N].clone()
        if few.is_floating_point() and few.numel():
            flat = few.view(5, -1)
            flat[0, 0], flat[1, 0], flat[2, -1] = float("nan"), float("inf"), float("-inf")
            flat[3] = -0.0
            flat[4] *= _LARGE
        out.append(few)
    return tuple(out)


def measure(case: Case, module: ModuleType, device: str = "cpu") -> Excess:
    """The worst element, within tolerance or not."""
    case = moved(case, device)
    with torch.no_grad():
        return worst(case, outputs(case, module), expected(case))


def allowed(case: Case) -> Tolerance:
    """The tolerance of a case: that of its operator's class and its dtype."""
    known = operators()
    op_class = known[case.operator].op_class if case.operator in known else "reduction"
    return tolerance(op_class, case.dtype)


@quiet()
def outputs(case: Case, module: ModuleType) -> torch.Tensor:
    """What a backend gives for a whole case: [N, ...], sequences one after the other, each prefilled whole."""
    case = copied(case)  # an operator that writes to its operands must not move what it is compared with
    if isinstance(case, SequenceCase):
        return torch.cat(case.run(module, case.sequences, whole(*lengths_of(tuple(case.sequences)))))
    if isinstance(case, MaskedCase):
        return case.run(module, case.rows, case.mask_N).reshape(-1)
    return case.run(module, case.rows)


@quiet()
def gradients(case: Case, module: ModuleType) -> torch.Tensor | None:
    """What a backend gives for the gradients of a whole case, [N, ...]; None where the case has none."""
    case = copied(case)
    if isinstance(case, MaskedCase) or case.gradient is None:
        return None
    if isinstance(case, SequenceCase):
        return torch.cat(case.gradient(module, case.sequences))
    return case.gradient(module, case.rows)


def expected(case: Case) -> torch.Tensor:
    """What the reference gives, in the shape of `outputs`."""
    if isinstance(case, SequenceCase):
        return torch.cat([case.reference(sequence) for sequence in case.sequences])
    if isinstance(case, MaskedCase):
        return case.reference(case.rows, case.mask_N).reshape(-1)
    return case.reference(case.rows)


def worst(case: Case, got: torch.Tensor, reference: torch.Tensor) -> Excess:
    """The element farthest from `reference` in tolerances. Raises OperandError when the shapes differ."""
    if got.shape != reference.shape:
        raise OperandError(f"{case.operator}: the output is {tuple(got.shape)}, the reference {tuple(reference.shape)}")
    bound = allowed(case)
    wide, right = got.to(torch.float64), reference.to(torch.float64)
    share = (wide - right).abs() / (bound.atol + bound.rtol * right.abs())
    # A finite reference that the candidate's dtype cannot hold rounds to the infinity it should be.
    held = reference.to(got.dtype).to(torch.float64)
    agree = torch.where(held.isfinite(), wide.isfinite(), (wide == held) | (wide.isnan() & held.isnan()))
    share = torch.where(agree, torch.where(held.isfinite(), share, 0.0), float("inf"))
    if share.numel() == 0:
        return Excess(case.operator, case.name, 0.0, 0, 0, 0.0, 0.0)
    flat = share.reshape(len(share), -1)
    at = int(flat.argmax())
    row, element = divmod(at, flat.shape[1])
    left, correct = (one.reshape(len(share), -1)[row, element] for one in (got, reference))
    return Excess(case.operator, case.name, float(flat[row, element]), row, element, float(correct), float(left))
