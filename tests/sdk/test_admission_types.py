"""Strict believes no field of a wrong type, and no log-probabilities that are of something else."""

import math

import numpy as np
import pytest
import torch

from rlk_ledger_schemas.events import Logprobs
from rlk_ledger_schemas.events.samples import WeightSpan
from rlk_ledger_schemas.fingerprints import contract_id, mask_digest, token_digest
from rlk_ledger_sdk.admission import admit
from rlk_ledger_sdk.diagnostics import diagnose
from rlk_ledger_sdk.testing import capture

BODY = {"mode": "processed", "temperature": 1.0, "compute_dtype": "bfloat16"}
CONTRACT = {"version": "1", "body": BODY}
ID = contract_id("logprob", "1", BODY)
TOKENS, MASK = [5, 6, 7, 8], [1, 1, 0, 1]
VALUES = [-0.5, -0.25, -0.125, -1.0]
SPAN = {"version": "v1", "start": 0, "end": 4}


def sample(**changes):
    fields = {
        "sample_id": "s0",
        "prompt_token_ids": [1, 2],
        "response_token_ids": TOKENS,
        "loss_mask": MASK,
        "token_digest": token_digest(TOKENS),
        "sampling": {"temperature": 1.0},
        "weight_spans": [SPAN],
        "engine": "e0",
        "logprobs": VALUES,
        "contract_id": ID,
        **changes,
    }
    return {name: value for name, value in fields.items() if value is not ...}


def scores(**changes):
    """A sample whose log-probabilities come as the fields of their event."""
    return sample(contract_id=..., logprobs={"values": VALUES, "contract_id": ID, **changes})


def reasons(one):
    with capture(mode={"consistency": "strict"}):
        (decision,) = admit([one], contracts=[CONTRACT]).decisions
    return {f"{reason.code} {reason.field}" for reason in decision.reasons}


GOOD = [
    sample(),
    scores(sample_id="s0", source="rollout", token_digest=token_digest(TOKENS), mask_digest=mask_digest(MASK)),
    scores(value_class=[0, 0, 5, 0]),
    sample(weight_spans=(WeightSpan(version="v1", start=0, end=4),)),
    sample(weight_spans=[{"version": "v1", "start": np.int64(0), "end": np.int32(4)}]),
    sample(sampling={"temperature": np.float32(1.0), "top_k": -1}),
    *(sample(logprobs=torch.tensor(VALUES).to(dtype)) for dtype in (torch.float64, torch.bfloat16, torch.float16)),
    sample(logprobs=torch.tensor([-1.0] * 8, requires_grad=True)[::2]),
    sample(logprobs=torch.full((4,), -1.0).to(torch.float8_e4m3fn)),
    sample(logprobs=[-1, -2, -3, -4]),
    sample(logprobs=[np.float32(-1.0), None, None, -4.0], loss_mask=[1, 0, 0, 1]),
]


@pytest.mark.parametrize("one", GOOD)
def test_numbers_of_every_kind_are_admitted(one):
    assert reasons(one) == set()


SPANS = [
    "v1",
    b"v1",
    (s for s in [SPAN]),
    {**SPAN},
    [{**SPAN, "start": 0.9}],
    [{**SPAN, "start": False}],
    [{**SPAN, "end": "4"}],
    [{**SPAN, "end": math.nan}],
    [{**SPAN, "version": ["v1"]}],
    [{**SPAN, "version": 1}],
]
NO_NUMBERS = [
    ["-0.5"] * 4,
    "0000",
    b"\0\0\0\0",
    bytearray(4),
    [False] * 4,
    [-0.5, True, -0.5, -0.5],
    np.zeros(4, bool),
    torch.zeros(4, dtype=torch.bool),
    np.full(4, -0.5 + 1j),
    torch.full((4,), -0.5 + 1j),
    np.array(["-1"] * 4),
    np.array([-1.0, "-1", -1.0, -1.0], object),
    np.zeros(4, "M8[s]"),
    np.zeros(4, "m8[s]"),
    {"a": 1, "b": 2, "c": 3, "d": 4}.keys(),
    {-1.0, -2.0, -3.0, -4.0},
]


@pytest.mark.parametrize("spans", SPANS, ids=repr)
def test_spans_are_a_list_of_whole_numbers_and_names(spans):
    assert reasons(sample(weight_spans=spans)) == {"metadata_malformed weight_spans"}


@pytest.mark.parametrize("values", NO_NUMBERS, ids=repr)
def test_what_only_converts_to_a_number_is_no_log_probability(values):
    assert reasons(sample(logprobs=values)) == {"metadata_malformed logprobs"}


@pytest.mark.parametrize("values", NO_NUMBERS[:-2], ids=repr)
def test_live_drift_refuses_them_too(values):
    with capture(on_error="warn"):
        seen = diagnose([VALUES], [values])
    assert (seen.status, seen.metrics) == ("failed", {})


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"engine": 0}, "engine"),
        ({"engine": {}}, "engine"),
        ({"sample_id": 5}, "sample_id"),
        ({"sample_id": math.nan}, "sample_id"),
        ({"prompt_token_ids": "hello"}, "prompt_token_ids"),
        ({"prompt_token_ids": [1.5]}, "prompt_token_ids"),
        ({"prompt_token_ids": [True]}, "prompt_token_ids"),
        ({"prompt_token_ids": ..., "prompt_id": 7}, "prompt_id"),
        ({"sampling": "t=1"}, "sampling"),
        ({"sampling": {"temperature": True}}, "sampling.temperature"),
        ({"sampling": {"temperature": 1.0, "top_p": "1"}}, "sampling.top_p"),
        ({"metadata_source": "measured"}, "metadata_source"),
        ({"metadata_source": {"engine": "guessed"}}, "metadata_source"),
    ],
)
def test_a_field_that_record_would_refuse_is_malformed(changes, field):
    assert f"metadata_malformed {field}" in reasons(sample(**changes))


@pytest.mark.parametrize("blank", [" ", "\t\n"])
def test_blanks_are_no_name(blank):
    assert reasons(sample(engine=blank)) == {"metadata_missing engine"}


@pytest.mark.parametrize(
    ("one", "found"),
    [
        (scores(sample_id="s1"), "metadata_malformed logprobs"),
        (scores(source="training"), "metadata_malformed logprobs"),
        (scores(token_digest=token_digest([9, 9, 9, 9])), "digest_differs logprobs.token_digest"),
        (scores(mask_digest=mask_digest([1, 1, 1, 1])), "digest_differs logprobs.mask_digest"),
        (scores(token_ids=[9, 9, 9, 9]), "digest_differs logprobs.token_ids"),
        (scores(value_class=[0, 5, 0, 0]), "values_not_measured logprobs"),
        (scores(value_class=[0]), "lengths_differ logprobs.value_class"),
        (scores(value_class=["x"] * 4), "metadata_malformed logprobs.value_class"),
        ({**scores(), "contract_id": "sha256:00"}, "contract_mismatch contract_id"),
    ],
)
def test_log_probabilities_of_something_else_are_not_the_samples(one, found):
    assert reasons(one) == {found}


def test_an_event_under_another_samples_name_is_not_believed():
    event = Logprobs(sample_id="s1", source="rollout", values=VALUES, contract_id=ID)
    with capture(mode={"consistency": "strict"}):
        admitted = admit([sample(logprobs=..., contract_id=...)], scores={"s0": event}, contracts=[CONTRACT])
    assert admitted.batch == []


@pytest.mark.parametrize("mask", [[], [0], [0] * 9, np.zeros(3, np.uint8)])
def test_a_mask_of_another_length_is_not_one_without_active_tokens(mask):
    assert reasons(sample(loss_mask=mask)) == {"lengths_differ loss_mask"}


def test_a_mask_that_was_made_up_excuses_nothing():
    made_up = sample(loss_mask=[0] * 4, metadata_source={"loss_mask": "defaulted"})
    assert reasons(made_up) == {"metadata_defaulted loss_mask"}
