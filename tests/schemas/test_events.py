"""Events: construction checks one event, keyword and typed form give the same bytes, arrays keep their bits."""

import struct
from array import array
from types import MappingProxyType

import msgspec
import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlk_ledger_schemas import codec, events
from rlk_ledger_schemas.arrays import Array, to_array
from rlk_ledger_schemas.errors import EventError, UsageError

SAMPLE = {"sample_id": "s0", "response_token_ids": [1, 2, 3], "loss_mask": [1, 0, 1]}
SCORE = {"sample_id": "s0", "source": "rollout", "values": [-0.5, -1.0], "contract_id": "sha256:00"}
ASSIGNED = {"schema_version": 1, "seq": 0, "wall_ns": 0, "mono_ns": 0, "run_id": "r", "writer_id": "w"}


def check(type_name: str, **fields: object) -> tuple[object, dict[str, Array]]:
    return events.check_fields(type_name, dict(fields), ASSIGNED)


def test_typed_and_keyword_form_give_the_same_payload() -> None:
    typed = events.RolloutSample(**SAMPLE, sampling={"temperature": 0.7}, labels={"a": "b"}, step=3)
    left = check("rollout.sample", **SAMPLE, sampling={"temperature": 0.7}, labels={"a": "b"}, step=3)
    right = events.check_fields(typed.TYPE, typed.fields(), ASSIGNED)
    assert events.encode(left[0]) == events.encode(right[0])
    assert left[1] == right[1]


def test_nothing_the_caller_owns_survives_construction() -> None:
    ids, labels, body = numpy.array([1, 2, 3], dtype=numpy.int32), {"k": "v"}, {"nested": {"list": [1, 2]}}
    sample = events.RolloutSample(sample_id="s", response_token_ids=ids, loss_mask=[1, 1, 1], labels=labels)
    contract = events.ContractDeclared(kind="logprob", version="1", body=body)
    ids[0], labels["k"] = 99, "changed"
    body["nested"]["list"].append(3)
    assert sample.response_token_ids.tolist() == [1, 2, 3]
    assert sample.labels == {"k": "v"}
    assert contract.body["nested"]["list"] == (1, 2)
    assert isinstance(contract.body["nested"], MappingProxyType)
    with pytest.raises(TypeError):
        contract.body["nested"]["x"] = 1


@pytest.mark.parametrize(
    ("type_name", "fields", "said"),
    [
        ("rollout.sampel", {}, "did you mean 'rollout.sample'"),
        ("logprobs", SCORE | {"valeus": [1.0]}, "no field 'valeus'; did you mean 'values'"),
        ("logprobs", SCORE | {"seq": 3}, "no field 'seq'"),
        ("logprobs", SCORE | {"step": True}, "got `bool` at `step`"),
        ("logprobs", SCORE | {"step": 1.9}, "got `float` at `step`"),
        ("logprobs", SCORE | {"step": -1}, ">= 0"),
        ("logprobs", SCORE | {"weight_version": {"from": 1}}, "Expected `str | null`"),
        ("logprobs", SCORE | {"values": ["a"]}, "`logprobs.values[0]` must be a number, got 'a'"),
        ("logprobs", SCORE | {"values": [1e300]}, "cannot hold"),
        ("logprobs", SCORE | {"values": None}, "`values` is required"),
        ("logprobs", SCORE | {"values": numpy.zeros((2, 2), dtype="f4")}, "one dimension, got shape (2, 2)"),
        ("logprobs", SCORE | {"values": "abc"}, "must be a list of numbers"),
        ("logprobs", SCORE | {"source": "trainer"}, "`source` must be one of"),
        ("contract.declared", {"kind": "logprobs", "version": "1", "body": {}}, "at `kind`; use one of logprob, att"),
        (
            "weights.published",
            {"weight_version": "v", "digest": "ab", "tensor_count": 1},
            "expected `<algorithm>:<hex>`",
        ),
        ("logprobs", SCORE | {"entropy": [1.0]}, "`entropy` has 1 entries for 2 values"),
        (
            "logprobs",
            SCORE | {"shard": {"axis": "sequence", "rank": 0, "world_size": 2, "ranges": [[0, 1]]}},
            "cover 1 positions",
        ),
        (
            "logprobs",
            SCORE | {"shard": {"axis": "sequence", "rank": 2, "world_size": 2, "ranges": [[0, 2]]}},
            "rank 2 is outside a world of 2",
        ),
        (
            "rollout.sample",
            SAMPLE | {"response_token_ids": [1, True, 3]},
            "`rollout.sample.response_token_ids[1]` is a bool",
        ),
        ("rollout.sample", SAMPLE | {"response_token_ids": [1, 2.0, 3]}, "[1]` must be an int"),
        ("rollout.sample", SAMPLE | {"response_token_ids": [1, 2**31, 3]}, "outside int32"),
        (
            "rollout.sample",
            SAMPLE | {"response_token_ids": numpy.array([1, 2**40, 3])},
            "[1]` is 1099511627776; int32 holds",
        ),
        ("rollout.sample", SAMPLE | {"response_token_ids": numpy.array([1.0, 2.0, 3.0])}, "does not convert"),
        ("rollout.sample", SAMPLE | {"loss_mask": [1, 0]}, "`loss_mask` has 2 entries for 3"),
        ("rollout.sample", SAMPLE | {"loss_mask": [1, 0, 2]}, "0 and 1 only"),
        ("rollout.sample", SAMPLE | {"weight_spans": [{"version": "v", "start": 0, "end": 4}]}, "[0, 4)"),
        ("rollout.sample", SAMPLE | {"sampling": {"temprature": 1.0}}, "unknown field"),
        ("rollout.sample", SAMPLE | {"token_digest": "abc"}, "token_digest"),
        ("writer.opened", {"role": "rollout", "rank": 2, "world_size": 2}, "rank 2 is outside a world of 2"),
        ("contract.declared", {"kind": "logprob", "version": "1", "body": {"t": float("nan")}}, "`$.body.t` is nan"),
        ("contract.declared", {"kind": "logprob", "version": "1", "body": {}, "contract_id": "x"}, "the body gives"),
        ("segment.timed", {"elapsed_ns": 5}, "give either `operator`"),
        ("segment.timed", {"operator": "mlp", "collective": "all_reduce", "elapsed_ns": 5}, "give either `operator`"),
        ("segment.timed", {"operator": "mlp", "exposed_ns": 5}, "as a segment of its own"),
        ("segment.timed", {"collective": "all_reduce", "compute_ns": 5}, "as a segment of its own"),
        ("segment.timed", {"operator": "mlp", "calls": 2}, "nothing was measured"),
        (
            "collective.observed",
            {
                "op": "all_reduce",
                "group": "tp",
                "group_size": 2,
                "reduction_order": "arrival",
                "determinism": "topology_stable",
            },
            "cannot be claimed",
        ),
        (
            "boundary.captured",
            {"boundary": "norm", "order": 0, "digest": "sum64x2:00", "shape": [2, 2], "values": [1.0, 2.0, 3.0]},
            "`values` has 3 items",
        ),
    ],
)
def test_a_wrong_event_is_refused_in_one_sentence_that_names_the_place(
    type_name: str, fields: dict[str, object], said: str
) -> None:
    with pytest.raises(UsageError) as caught:
        check(type_name, **fields)
    assert said in str(caught.value), str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_mask_may_be_bools_or_whole_floats_and_nothing_else() -> None:
    torch = pytest.importorskip("torch")
    for mask in (
        [1, 0, 1],
        [True, False, True],
        [1.0, 0.0, 1.0],
        numpy.array([1.0, 0.0, 1.0]),
        numpy.array([True, False, True]),
        torch.tensor([1.0, 0.0, 1.0]),
        torch.tensor([1, 0, 1], dtype=torch.bfloat16),
    ):
        _, arrays = check("rollout.sample", **SAMPLE | {"loss_mask": mask})
        assert arrays["loss_mask"].data == b"\1\0\1"
    for bad in ([1.0, 0.5, 1.0], numpy.array([1.0, 0.5, 1.0]), numpy.array([1.0, numpy.nan, 1.0]), [1.0, -1.0, 0.0]):
        with pytest.raises(EventError, match="loss_mask"):
            check("rollout.sample", **SAMPLE | {"loss_mask": bad})


def test_numpy_scalars_are_plain_numbers() -> None:
    wire, _ = check("logprobs", **SCORE, step=numpy.int64(4), attempt=numpy.int32(1))
    assert (wire.step, wire.attempt) == (4, 1)


def test_a_contract_gets_its_id_and_the_same_body_the_same_id() -> None:
    left, _ = check("contract.declared", kind="logprob", version="1", body={"a": 1.0, "b": "x"})
    right, _ = check("contract.declared", kind="logprob", version="1", body={"b": "x", "a": 1})
    assert left.contract_id == right.contract_id
    assert left.contract_id.startswith("sha256:")


def test_unknown_fields_of_a_newer_writer_stay_in_the_envelope() -> None:
    wire, _ = check("writer.closed", reason="done")
    envelope = codec._decode(events.encode(wire)) | {"from_the_future": [1, {"x": 2}]}
    assert codec.decode_envelope(msgspec.msgpack.encode(envelope))["from_the_future"] == [1, {"x": 2}]


def test_nested_arrays_leave_their_parent() -> None:
    wire, arrays = check("rollout.sample", **SAMPLE, routed_experts={"coverage": 1.0, "array": [0, 1, 2], "top_k": 1})
    assert wire.routed_experts.coverage == 1.0
    assert arrays["routed_experts.array"].tolist() == [0, 1, 2]
    _, arrays = check(
        "logprobs", **SCORE, partials={"max": [1.0, 2.0], "sum_exp": [1.0, 1.0], "target_logit": [0.0, 0.0]}
    )
    assert arrays["partials.max"].tolist() == [1.0, 2.0]


@given(st.lists(st.integers(0, 2**32 - 1), max_size=40))
def test_float32_bits_survive_from_every_container(words: list[int]) -> None:
    data = struct.pack(f"<{len(words)}I", *words)
    values = numpy.frombuffer(data, dtype="<f4")
    assert to_array(values, "float32", "x").data == data
    assert to_array(values[::-1][::-1], "float32", "x").data == data
    assert to_array(Array("float32", data), "float32", "x").data == data


def test_every_integer_container_gives_the_same_bytes() -> None:
    want = struct.pack("<3i", 5, -6, 7)
    torch = pytest.importorskip("torch")
    for value in (
        [5, -6, 7],
        (5, -6, 7),
        array("i", [5, -6, 7]),
        numpy.array([5, -6, 7]),
        numpy.array([5, -6, 7], dtype=">i4"),
        numpy.array([[5, -6, 7]]),
        [numpy.int64(5), numpy.int64(-6), numpy.int32(7)],
        torch.tensor([5, -6, 7]),
        torch.tensor([0, 5, 0, -6, 0, 7])[1::2],
    ):
        assert to_array(value, "int32", "x").data == want


def test_low_precision_tensors_widen_exactly() -> None:
    torch = pytest.importorskip("torch")
    values = torch.randn(64, requires_grad=True).to(torch.bfloat16)
    assert to_array(values, "float32", "x").data == values.detach().float().numpy().tobytes()
    half = numpy.array([1.5, -0.0, 6e-8], dtype="f2")
    assert to_array(half, "float32", "x").data == half.astype("f4").tobytes()


def test_every_registered_type_round_trips_through_its_own_fields() -> None:
    for name, kind in events.REGISTRY.items():
        assert name == kind.public.TYPE
        assert kind.wire.__struct_config__.tag == name
        assert not set(kind.arrays) - kind.names


@pytest.mark.parametrize("name", events.ASSIGNED)
def test_only_the_recorder_assigns_what_it_assigns(name: str) -> None:
    for value in (0, 1, "", "w", None, events.ASSIGNED):
        with pytest.raises(EventError, match=f"no field '{name}'"):
            check("logprobs", **SCORE, **{name: value})


def test_an_envelope_decodes_as_the_struct_that_readers_are_shown() -> None:
    wire, _ = check("logprobs", **SCORE, step=3)
    read = msgspec.msgpack.decode(events.encode(wire), type=events.envelope_struct(events.REGISTRY["logprobs"]))
    assert (read.seq, read.writer_id, read.step) == (0, "w", 3)


def test_a_bad_event_object_cannot_be_built() -> None:
    with pytest.raises(EventError, match="loss_mask"):
        events.RolloutSample(sample_id="s", response_token_ids=[1], loss_mask=[1, 1])
