"""Claims: what is claimed and was not measured is no pass; tokens of a wrong shape are refused on every device."""

from __future__ import annotations

import pytest
import torch

from rlk_ledger_kernels.errors import OperandError
from rlk_ledger_kernels.ops.selected_logprob import triton as selected_logprob
from rlk_ledger_kernels.ops.selected_logprob.contract import LogprobContract
from rlk_ledger_kernels.suite.certificate import Certificate, Scope
from rlk_ledger_schemas.events.certificates import Checked, OperatorChecked

PASSED, REFUSED = Checked("passed"), Checked("not_measured", "the contract was refused")


def certificate(invariance: Checked) -> Certificate:
    one = OperatorChecked("linear", "torch", ("1",), 2, invariance, PASSED, PASSED, PASSED, PASSED)
    return Certificate(Scope(), (one,), (), (), "a class", {}, 0.0)


def test_a_claim_of_invariance_that_was_not_measured_is_no_pass() -> None:
    assert certificate(PASSED).verdict == "pass"
    assert certificate(Checked("not_claimed")).verdict == "pass"
    found = certificate(REFUSED)
    assert found.verdict == "inconclusive"
    assert str(found.gap).endswith("not measured: the contract was refused")


def test_tokens_of_a_wrong_shape_are_refused_on_every_device() -> None:
    logits_NV = torch.empty((3, 32), device="meta")
    with pytest.raises(OperandError, match="one per row"):
        selected_logprob.selected_logprob(
            logits_NV, torch.empty(2, dtype=torch.int64, device="meta"), LogprobContract()
        )
