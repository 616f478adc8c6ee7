"""admit(): which samples a batch may be trained on, with a reason code for every one that may not."""

import copy
import math

import numpy as np
import pytest
import torch

from rlk_ledger_schemas.errors import AdmissionError, UsageError
from rlk_ledger_schemas.events import ContractDeclared, Logprobs, RolloutSample
from rlk_ledger_schemas.fingerprints import contract_id, mask_digest, token_digest
from rlk_ledger_schemas.modes import ON_MISSING, REASONS, STRICT_CONTRACT, STRICT_SAMPLE
from rlk_ledger_schemas.tolerances import VERSION
from rlk_ledger_sdk.admission import admit
from rlk_ledger_sdk.testing import capture, read_spool

STRICT = {"mode": {"consistency": "strict"}}
AUDIT = {"mode": {"consistency": "audit"}}
BODY = {"mode": "processed", "temperature": 0.7, "compute_dtype": "bfloat16"}
CONTRACT = {"kind": "logprob", "version": "1", "body": BODY}
ID = contract_id("logprob", "1", BODY)
TOKENS = [5, 6, 7, 8]


def complete(name="s0", **changes):
    """A sample that strict admits."""
    sample = {
        "sample_id": name,
        "group_id": "g0",
        "prompt_token_ids": [1, 2],
        "response_token_ids": TOKENS,
        "loss_mask": [1, 1, 0, 1],
        "token_digest": token_digest(TOKENS),
        "mask_digest": mask_digest([1, 1, 0, 1]),
        "sampling": {"temperature": 0.7},
        "weight_spans": [{"version": "v1", "start": 0, "end": 3}, {"version": "v2", "start": 3, "end": 4}],
        "engine": "e0",
        "logprobs": [-0.5, -0.25, math.nan, -1.0],
        "contract_id": ID,
    }
    sample.update(changes)
    return {k: v for k, v in sample.items() if v is not ...}


def judged(sample, **options):
    """The (code, field) pairs of one sample under strict."""
    with capture(**STRICT):
        admitted = admit([sample], **{"contracts": [CONTRACT], **options})
    return [(r.code, r.field) for r in admitted.decisions[0].reasons]


FORMS = {
    "lists": complete(),
    "tuples": {k: tuple(v) if isinstance(v, list) else v for k, v in complete().items()},
    "numpy": complete(
        response_token_ids=np.array(TOKENS), loss_mask=np.array([1, 1, 0, 1], bool), logprobs=np.array([-1.0] * 4)
    ),
    "torch": complete(
        response_token_ids=torch.tensor(TOKENS),
        loss_mask=torch.tensor([1.0, 1.0, 0.0, 1.0]),
        logprobs=torch.full((4,), -1.0, requires_grad=True),
    ),
    "a prompt by its id": complete(prompt_token_ids=..., prompt_id="p0"),
    "None where nothing is trained": complete(logprobs=[-0.5, -0.25, None, -1.0]),
    "an event for the scores": complete(
        logprobs=Logprobs(sample_id="s0", source="rollout", values=[-1.0] * 4, contract_id=ID), contract_id=...
    ),
    "a mapping for the scores": complete(logprobs={"values": [-1.0] * 4, "contract_id": ID}, contract_id=...),
    "measured": complete(metadata_source={"engine": "measured", "weight_spans": "derived"}),
    "the contract with the sample": complete(contract=CONTRACT),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_complete_sample_is_admitted_in_every_form(form):
    options = {"contracts": ()} if form == "the contract with the sample" else {}
    assert judged(FORMS[form], **options) == []


def test_events_are_judged_like_mappings():
    fields = {k: v for k, v in complete().items() if k not in ("logprobs", "contract_id")}
    event = RolloutSample(**fields)
    score = Logprobs(sample_id="s0", source="rollout", values=[-1.0] * 4, contract_id=ID)
    declared = ContractDeclared(kind="logprob", version="1", body=BODY)
    assert judged(event, scores={"s0": score}, contracts=[declared]) == []
    assert judged(event) == [("metadata_missing", "logprobs"), ("metadata_missing", "contract_id")]


# -- every reason ------------------------------------------------------------------------------------------------------


def without(path):
    sample = copy.deepcopy(complete())
    holder, _, name = path.rpartition(".")
    del (sample[holder] if holder else sample)[name]
    return sample


@pytest.mark.parametrize("needed", STRICT_SAMPLE, ids=lambda n: n.name)
def test_each_thing_on_the_list_is_required(needed):
    sample = complete()
    for path in needed.fields:
        sample = without(path) if path in ("sampling.temperature",) else {k: v for k, v in sample.items() if k != path}
    assert judged(sample) == [("metadata_missing", needed.name)]


@pytest.mark.parametrize("needed", STRICT_SAMPLE, ids=lambda n: n.name)
@pytest.mark.parametrize(("source", "code"), [("defaulted", "metadata_defaulted"), ("absent", "metadata_missing")])
def test_a_value_nobody_measured_is_no_value(needed, source, code):
    sample = complete(metadata_source=dict.fromkeys(needed.fields, source))
    assert judged(sample) == [(code, needed.name)]


def test_a_defaulted_field_of_the_scores_counts_and_one_alternative_suffices():
    score = {"values": [-1.0] * 4, "contract_id": ID, "metadata_source": {"values": "defaulted"}}
    assert judged(complete(logprobs=score)) == [("metadata_defaulted", "logprobs")]
    assert judged(complete(prompt_id="p", metadata_source={"prompt_id": "defaulted"})) == []
    assert judged(complete(metadata_source={"sampling": "defaulted"})) == [
        ("metadata_defaulted", "sampling.temperature")
    ]


@pytest.mark.parametrize("field", STRICT_CONTRACT)
def test_a_contract_must_say_what_a_tolerance_needs(field):
    contract = {**CONTRACT, "body": {k: v for k, v in BODY.items() if k != field}}
    name = contract_id("logprob", "1", contract["body"])
    assert judged(complete(contract_id=name), contracts=[contract]) == [("metadata_missing", f"contract.{field}")]


def other(version="1", **body):
    contract = {"kind": "logprob", "version": version, "body": {**BODY, **body}}
    return {"contract": contract, "contract_id": contract_id("logprob", version, contract["body"])}


SPANS = [
    [],
    [{"version": "v1", "start": 0, "end": 3}],
    [{"version": "v1", "start": 1, "end": 4}],
    [{"version": "v1", "start": 0, "end": 2}, {"version": "v1", "start": 3, "end": 4}],
    [{"version": "v1", "start": 0, "end": 3}, {"version": "v2", "start": 2, "end": 4}],
    [{"version": "v1", "start": 0, "end": 5}],
    [{"version": "", "start": 0, "end": 4}],
]
WRONG = [
    (complete(loss_mask=[1, 1, 1], mask_digest=...), ["lengths_differ loss_mask"]),
    (complete(logprobs=[-1.0] * 3), ["lengths_differ logprobs"]),
    (complete(logprobs={"values": [-1.0] * 4, "start": 1}), ["lengths_differ logprobs"]),
    (complete(response_token_ids=["a"] * 4), ["metadata_malformed response_token_ids"]),
    (complete(response_token_ids=[1.5] * 4), ["metadata_malformed response_token_ids"]),
    (complete(response_token_ids=[2**40] * 4), ["metadata_malformed response_token_ids"]),
    (complete(loss_mask=[1, 2, 0, 1]), ["metadata_malformed loss_mask"]),
    (complete(logprobs=[-1.0, "x", -1.0, -1.0]), ["metadata_malformed logprobs"]),
    (complete(weight_spans=[{"version": "v1"}]), ["metadata_malformed weight_spans"]),
    (complete(weight_spans=[3]), ["metadata_malformed weight_spans"]),
    (complete(token_digest="kblake2b:00"), ["metadata_malformed token_digest"]),
    (complete(contract="x", contract_id="nobody"), ["metadata_malformed contract"]),
    (complete(token_digest=token_digest([5, 6, 7, 9])), ["digest_differs token_digest"]),
    (complete(mask_digest=mask_digest([1, 1, 1, 1])), ["digest_differs mask_digest"]),
    (complete(contract=CONTRACT, contract_id="sha256:00"), ["digest_differs contract_id"]),
    *((complete(weight_spans=spans), ["spans_incomplete weight_spans"]) for spans in SPANS),
    *(
        (complete(logprobs=[-1.0, bad, -1.0, -1.0]), ["values_not_measured logprobs"])
        for bad in (None, math.nan, math.inf, -math.inf, -9999.0, 0.5)
    ),
    (complete(contract_id="sha256:00"), ["contract_undeclared contract_id"]),
    (complete(sampling={"temperature": 1.0}), ["contract_mismatch temperature"]),
    (complete(sampling={"temperature": 0.699999988079071}), []),  # 0.7 as a float32, which is what engines hold
    (complete(sampling={"temperature": 0.7, "top_p": 0.9}, **other(top_p=1.0)), ["contract_mismatch top_p"]),
    (complete(**other(version="2")), ["no_tolerance contract.version"]),
    (complete(**other(compute_dtype="float8_e4m3")), ["no_tolerance contract.compute_dtype"]),
    (complete(**other(compute_dtype=["float32"])), ["no_tolerance contract.compute_dtype"]),
    (complete(loss_mask=[0] * 4, mask_digest=...), ["zero_active_tokens loss_mask"]),
    (complete(response_token_ids=[], loss_mask=[]), ["zero_active_tokens loss_mask"]),
    ("text", ["metadata_malformed sample"]),
    (None, ["metadata_malformed sample"]),
]


@pytest.mark.parametrize(("sample", "reasons"), WRONG)
def test_each_fault_has_its_reason_and_no_other(sample, reasons):
    assert [" ".join(pair) for pair in judged(sample)] == reasons


def test_a_filter_in_a_raw_contract_says_nothing_about_sampling():
    assert judged(complete(**other(mode="raw", temperature=1.0))) == []


def test_the_trainers_own_contract_must_agree_in_what_is_semantic():
    same = {**CONTRACT, "body": {**BODY, "compute_dtype": "float32", "execution_path": "full_prefill"}}
    apart = {**CONTRACT, "body": {**BODY, "temperature": 1.0}}
    assert judged(complete(), contract=same) == []
    assert judged(complete(), contract=apart) == [("contract_mismatch", "temperature")]


def test_every_sample_reason_is_reached_by_a_test_and_every_reached_one_is_registered():
    reached = {reason.partition(" ")[0] for _, reasons in WRONG for reason in reasons}
    reached |= {"metadata_missing", "metadata_defaulted"}
    assert reached == {code for code, reason in REASONS.items() if reason.scope == "sample"}


# -- what becomes of the batch -----------------------------------------------------------------------------------------

BATCH = [complete("s0"), complete("s1", engine=...), complete("s2"), complete("s3", weight_spans=...)]
EMPTY = complete("s4", loss_mask=[0] * 4, mask_digest=...)


def strict(batch, **options):
    with capture(**STRICT) as events:
        return admit(batch, contracts=[CONTRACT], **options), events


def test_quarantine_takes_incomplete_samples_out_and_counts_them():
    admitted, events = strict([*BATCH, EMPTY])
    assert admitted.outcome == "quarantined"
    assert [s["sample_id"] for s in admitted.batch] == ["s0", "s2", "s4"]
    assert all(a is b for a, b in zip(admitted.batch, (BATCH[0], BATCH[2], EMPTY), strict=True))
    assert admitted.kept == (0, 2, 4)
    assert admitted.mode.consistency == "strict"
    (event,) = events
    assert (event.type, event.fields["outcome"]) == ("batch.admitted", "quarantined")
    counts = {k: event.fields[k] for k in ("samples", "admitted", "quarantined", "not_applicable")}
    assert counts == {"samples": 5, "admitted": 2, "quarantined": 2, "not_applicable": 1}
    assert event.fields["reasons"] == {"metadata_missing": 2, "zero_active_tokens": 1}
    assert event.fields["decisions"] == [
        {
            "status": "quarantined",
            "reasons": [{"code": "metadata_missing", "field": "engine"}],
            "sample_ids": ["s1"],
        },
        {
            "status": "quarantined",
            "reasons": [{"code": "metadata_missing", "field": "weight_spans"}],
            "sample_ids": ["s3"],
        },
        {
            "status": "not_applicable",
            "reasons": [{"code": "zero_active_tokens", "field": "loss_mask"}],
            "sample_ids": ["s4"],
        },
    ]
    assert event.fields["tolerance_version"] == VERSION


def test_samples_with_one_fate_share_an_entry():
    _, events = strict([complete(f"s{i}", engine=...) for i in range(100)])
    (entry,) = events[0].fields["decisions"]
    assert len(entry["sample_ids"]) == 100


def test_fail_raises_one_clear_error_that_names_the_first_offenders():
    batch = [complete(f"s{i}", engine=...) for i in range(9)]
    with capture(**STRICT) as events, pytest.raises(AdmissionError) as caught:
        admit([complete("ok"), *batch], "fail", contracts=[CONTRACT])
    text = str(caught.value)
    assert text.startswith("admit: 9 of 10 samples lack what strict needs: 's0': metadata_missing engine; 's1':")
    assert "; and 4 more. Record it where it is known." in text
    assert "\n" not in text
    assert [e.fields["outcome"] for e in events] == ["failed"]


def test_downgrade_trains_the_whole_batch_under_audit_and_says_so():
    admitted, events = strict(BATCH, on_missing="downgrade")
    assert admitted.batch is BATCH
    assert (admitted.outcome, admitted.mode.consistency) == ("downgraded", "audit")
    assert [d.sample_id for d in admitted.quarantined] == ["s1", "s3"]
    assert events[0].fields["outcome"] == "downgraded"
    assert events[0].fields["mode"]["consistency"] == "strict"


@pytest.mark.parametrize("on_missing", ON_MISSING)
def test_a_complete_batch_is_the_same_object_under_every_policy(on_missing):
    batch = [complete("s0"), EMPTY]
    admitted, events = strict(batch, on_missing=on_missing)
    assert admitted.batch is batch
    assert (admitted.outcome, admitted.mode.consistency) == ("admitted", "strict")
    assert [d.status for d in admitted.decisions] == ["admitted", "not_applicable"]
    assert events[0].fields["outcome"] == "admitted"


@pytest.mark.parametrize("on_missing", ON_MISSING)
def test_never_a_mixed_batch(on_missing):
    """Whatever the policy: a batch trained under strict holds no sample that lacks something."""
    try:
        admitted, _ = strict(BATCH, on_missing=on_missing)
    except AdmissionError:
        return
    if admitted.mode.consistency == "strict":
        assert [d.status for d in strict(admitted.batch)[0].decisions] == ["admitted"] * len(admitted.batch)
    else:
        assert admitted.batch is BATCH


@pytest.mark.parametrize("on_missing", ON_MISSING)
def test_audit_changes_nothing_and_records_what_strict_would_have_done(on_missing):
    with capture(**AUDIT) as events:
        admitted = admit(BATCH, on_missing, contracts=[CONTRACT])
    assert admitted.batch is BATCH
    assert (admitted.outcome, admitted.kept) == ("observed", (0, 1, 2, 3))
    assert [d.status for d in admitted.decisions] == ["admitted", "quarantined", "admitted", "quarantined"]
    assert (events[0].fields["outcome"], events[0].fields["quarantined"]) == ("observed", 2)


def test_where_nothing_left_every_row_is_kept_in_every_mode(opened):
    with capture(mode={"consistency": "off"}):
        admitted = admit(BATCH)
        unread = admit(iter(BATCH))
    assert (admitted.outcome, admitted.kept) == ("off", (0, 1, 2, 3))
    with pytest.raises(UsageError, match="has no places; give admit\\(\\) a list"):
        _ = unread.kept
    opened(on_error="warn", **AUDIT)
    assert admit(BATCH, "downgraded").kept == (0, 1, 2, 3), "a batch that could not be judged is whole"


def test_a_tuple_stays_a_tuple_and_nothing_of_a_sample_is_changed():
    before = repr(BATCH)
    admitted, _ = strict(tuple(BATCH))
    assert isinstance(admitted.batch, tuple)
    assert repr(BATCH) == before


def test_an_empty_batch_is_admitted():
    batch = []
    admitted, events = strict(batch)
    assert admitted.batch is batch
    assert events[0].fields["samples"] == 0


def test_what_is_no_batch_is_refused_under_strict_and_passed_on_under_audit(opened):
    unread = iter(BATCH)
    with capture(**STRICT), pytest.raises(UsageError, match="must be a list or a tuple"):
        admit(unread)
    with capture(**STRICT), pytest.raises(UsageError, match="did you mean 'downgrade'"):
        admit(BATCH, "downgraded")
    with capture(**STRICT), pytest.raises(UsageError, match="a contract is"):
        admit(BATCH, contracts=["x"])
    recorder = opened(on_error="warn", **AUDIT)
    assert admit(unread).batch is unread
    assert len(list(unread)) == len(BATCH)
    assert admit(BATCH, "downgraded").batch is BATCH
    assert [e.type for e in read_spool(recorder.directory).events if e.seq > 1] == ["gap", "gap"]


def test_a_sample_that_cannot_be_looked_at_is_quarantined():
    class Hostile(dict):
        def get(self, *_):
            raise RuntimeError("no")

    admitted, _ = strict([Hostile(), complete()])
    assert admitted.kept == (1,)
    assert admitted.decisions[0].reasons[0].detail == "RuntimeError: no"


def test_the_first_quarantine_is_a_warning_and_the_next_are_only_counted(caplog, monkeypatch):
    monkeypatch.setattr("rlk_ledger_sdk.admission._warned", set())
    for _ in range(3):
        strict(BATCH)
        strict(BATCH, on_missing="downgrade")
    told = [r.getMessage() for r in caplog.records]
    assert len(told) == 2
    assert "left the batch" in told[0]
    assert "downgraded it to audit" in told[1]
