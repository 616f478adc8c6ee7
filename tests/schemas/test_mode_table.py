"""What each (fast, consistency) pair means: nine rows written out, and the precedence rule that must give them."""

import itertools

import pytest

from rlk_ledger_schemas.errors import UsageError
from rlk_ledger_schemas.modes import (
    CONSISTENCY,
    FAST,
    OPTIMISED,
    REASONS,
    STRICT_CONTRACT,
    STRICT_SAMPLE,
    behaviour,
)

PRESERVING, OPPORTUNISTIC, REFERENCE, NATIVE = "contract_preserving", "opportunistic", "reference", "native"

TABLE = {
    # (fast, consistency): (buckets, preserve, without, record, admission)
    ("off", "off"): ((NATIVE,), False, "native", False, "none"),
    ("auto", "off"): ((PRESERVING, OPPORTUNISTIC, NATIVE), False, "fall_back", False, "none"),
    ("strict", "off"): ((PRESERVING, OPPORTUNISTIC), False, "error", False, "none"),
    ("off", "audit"): ((NATIVE,), False, "native", True, "observed"),
    ("auto", "audit"): ((PRESERVING, OPPORTUNISTIC, NATIVE), False, "fall_back", True, "observed"),
    ("strict", "audit"): ((PRESERVING, OPPORTUNISTIC), False, "error", True, "observed"),
    ("off", "strict"): ((NATIVE,), True, "error", True, "enforced"),
    ("auto", "strict"): ((PRESERVING, REFERENCE), True, "error", True, "enforced"),
    ("strict", "strict"): ((PRESERVING,), True, "error", True, "enforced"),
}


def test_the_table_has_every_pair():
    assert TABLE.keys() == set(itertools.product(FAST, CONSISTENCY))


@pytest.mark.parametrize("pair", TABLE, ids="-".join)
def test_a_pair_means_what_its_row_says(pair):
    got = behaviour(*pair)
    assert (got.buckets, got.preserve, got.without, got.record, got.admission) == TABLE[pair]


@pytest.mark.parametrize("consistency", CONSISTENCY)
def test_fast_strict_decides_first(consistency):
    """No optimised backend is an error whatever consistency says, and no reference or native operator stands in."""
    got = behaviour("strict", consistency)
    assert got.without == "error"
    assert set(got.buckets) <= OPTIMISED


@pytest.mark.parametrize("fast", FAST)
def test_consistency_strict_lets_nothing_run_that_does_not_preserve_the_contract(fast):
    got = behaviour(fast, "strict")
    assert got.preserve
    assert OPPORTUNISTIC not in got.buckets
    assert got.buckets


@pytest.mark.parametrize("pair", [("on", "audit"), ("off", "maybe"), ("strict", ""), ("audit", "auto")])
def test_what_is_no_mode_is_refused(pair):
    with pytest.raises(UsageError, match="no mode"):
        behaviour(*pair)


def test_reasons_are_complete_sentences_and_the_strict_list_names_each_thing_once():
    assert all(r.meaning and r.next_step.endswith(".") for r in REASONS.values())
    named = [field for needed in STRICT_SAMPLE for field in needed.fields]
    assert len(named) == len(set(named))
    assert {"weight_spans", "contract_id", "logprobs"} <= set(named)
    assert "compute_dtype" in STRICT_CONTRACT
