"""Small JSON objects: canonical bytes, self digests, refusals; the vocabulary is complete and frozen."""

import hashlib

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlk_ledger_schemas import columns, contracts, findings, merkle, metrics, objects, tolerances
from rlk_ledger_schemas.dtypes import dtype_name
from rlk_ledger_schemas.errors import FormatError, UsageError
from rlk_ledger_schemas.fingerprints import canonical_json, sha256

RECEIPT = objects.Receipt(
    format=1,
    ledger_id="l",
    run_id="r",
    shipper="s",
    n=0,
    segment=objects.SegmentRef(name="segment/s/0-00.parquet", bytes=10, rows=1, sha256="sha256:" + "0" * 64),
    writers=(objects.WriterRange(writer_id="w", first=0, last=0),),
    root="sha256:" + "1" * 64,
    types=(objects.TypeCount(type="gap", count=1),),
    wall_us=5,
)


def test_a_receipt_round_trips_and_its_self_is_the_digest_of_the_rest() -> None:
    data = objects.encode_receipt(RECEIPT)
    receipt = objects.decode_receipt(data, "receipt/s/0.json")
    fields = msgspec.json.decode(data)
    claimed = fields.pop("self")
    assert claimed == receipt.self_ == sha256(canonical_json(fields))
    assert objects.encode_receipt(receipt) == data


def test_every_flipped_bit_of_a_receipt_is_found() -> None:
    data = objects.encode_receipt(RECEIPT)
    for byte in range(len(data)):
        for bit in range(8):
            image = bytearray(data)
            image[byte] ^= 1 << bit
            with pytest.raises(FormatError, match="receipt/s/0"):
                objects.decode_receipt(bytes(image), "receipt/s/0.json")


@given(st.integers(0, 200))
def test_a_cut_receipt_is_found(cut: int) -> None:
    with pytest.raises(FormatError):
        objects.decode_receipt(objects.encode_receipt(RECEIPT)[:cut], "receipt")


def test_unknown_fields_of_a_newer_writer_are_covered_by_self() -> None:
    fields = msgspec.json.decode(objects.encode_receipt(RECEIPT)) | {"new": 1}
    fields.pop("self")
    data = canonical_json(fields | {"self": sha256(canonical_json(fields))})
    assert objects.decode_receipt(data, "x").n == 0
    with pytest.raises(FormatError):
        objects.decode_receipt(data.replace(b'"new":1', b'"new":2'), "x")


@pytest.mark.parametrize("depth", [900, 100_000])
def test_an_object_nested_too_deep_is_a_format_error(depth: int) -> None:
    data = b'{"a":' + b"[" * depth + b"]" * depth + b"}"
    for decode in (objects.decode_ledger, objects.decode_run, lambda data: objects.decode_receipt(data, "r")):
        with pytest.raises(FormatError, match="not RFC 8785 JSON"):
            decode(data)


@pytest.mark.parametrize(
    ("change", "said"),
    [({"format": 2}, "newer rlk-ledger"), ({"required_features": ["teleport"]}, "teleport"), ({"hash": "md5"}, "hash")],
)
def test_a_reader_refuses_a_ledger_it_does_not_know(change: dict[str, object], said: str) -> None:
    fields = {"format": 1, "hash": "sha256", "ledger_id": "l", "required_features": [], "created_us": 1}
    assert objects.decode_ledger(canonical_json(fields)).ledger_id == "l"
    with pytest.raises(FormatError, match=said):
        objects.decode_ledger(canonical_json(fields | change))


@pytest.mark.parametrize("bad", ["", ".", "..", "a/b", "../x", "a b", "x" * 129, "é", 3, None, "a\n", "a\\b"])
def test_run_ids_are_names_not_paths(bad: object) -> None:
    with pytest.raises(UsageError, match="run id"):
        objects.check_run_id(bad)


def test_run_ids_that_are_names() -> None:
    for good in ("r42", "a.b-c_D", "x" * 128):
        assert objects.check_run_id(good) == good


def slow_root(leaves: list[bytes]) -> bytes:
    if len(leaves) == 1:
        return leaves[0]
    split = 1
    while split * 2 < len(leaves):
        split *= 2
    return merkle.node(slow_root(leaves[:split]), slow_root(leaves[split:]))


@given(st.lists(st.binary(min_size=32, max_size=32), min_size=1, max_size=70))
def test_root_is_the_recursive_definition(leaves: list[bytes]) -> None:
    assert merkle.root(leaves) == slow_root(leaves)


def test_published_rfc6962_roots() -> None:
    """The eight leaves of the Certificate Transparency reference tests."""
    data = ["", "00", "10", "2021", "3031", "40414243", "5051525354555657", "606162636465666768696a6b6c6d6e6f"]
    leaves = [hashlib.sha256(b"\0" + bytes.fromhex(d)).digest() for d in data]
    roots = [
        "6e340b9cffb37a989ca544e6bb780a2c78901d3fb33738768511a30617afa01d",
        "fac54203e7cc696cf0dfcb42c92a1d9dbaf70ad9e621f4bd8d98662f00e3c125",
        "aeb6bcfe274b70a14fb067a5e5578264db0fa9b51af5e0ba159158f329e06e77",
        "d37ee418976dd95753c1c73862b9398fa2a2cf9b4ff0fdfe8b30cd95209614b7",
        "4e3bbb1f7b478dcfe71fb631631519a3bca12c9aefca1612bfce4c13a86264d4",
        "76e67dadbcdf1e10e1b74ddc608abd2f98dfb16fbce75277b5232a127f2087ef",
        "ddb89be403809e325750d3d263cd78929c2942b7942a34b77e122c9594a74c8c",
        "5dc9da79a70659a9ad559cb701ded9a2ab9d823aad2f4960cfe370eff4604328",
    ]
    assert [merkle.root(leaves[: i + 1]).hex() for i in range(8)] == roots


def test_vocabulary_is_whole() -> None:
    for name, kind in findings.FINDINGS.items():
        assert kind.severity in ("error", "gap", "info"), name
        assert all((kind.meaning, kind.needs, kind.query, kind.next_step)), name
    assert findings.exit_code([]) == 0
    assert findings.exit_code(["info"]) == 0
    assert findings.exit_code(["gap", "info"]) == 3
    assert findings.exit_code(["gap", "error"]) == 1


def test_every_metric_says_direction_space_and_reduction() -> None:
    assert len(metrics.METRICS) == 30
    for metric in metrics.METRICS.values():
        assert metric.formula
        assert metric.direction
        assert metric.space
        assert metric.reduction


def test_a_missing_tolerance_fails_closed() -> None:
    assert tolerances.tolerance("logprob", "bfloat16").atol == 6e-2
    with pytest.raises(UsageError, match="no default"):
        tolerances.tolerance("logprob", "float8")


def test_tolerances_are_frozen_by_fingerprint() -> None:
    assert tolerances.FINGERPRINT == "sha256:6b6302c84ef528af28e02c6245031760e4950bb50320f5db7a8ba59d736a589f"


def test_contract_fields_have_a_class_and_path_fields_never_differ() -> None:
    left = {"temperature": 1.0, "head_dtype": "float32", "execution_path": "decode", "only_left": 1}
    right = {"temperature": 0.7, "head_dtype": "bfloat16", "execution_path": "full_prefill"}
    rows = contracts.differing_fields("logprob", left, right)
    assert [(r[0], r[1]) for r in rows] == [("head_dtype", "numeric"), ("temperature", "semantic")]
    assert contracts.undeclared_fields("logprob", left, right) == [("only_left", "numeric")]


@pytest.mark.parametrize("written", ["bfloat16", "bf16", "BF16", "torch.bfloat16"])
def test_a_dtype_is_one_however_it_is_written(written: str) -> None:
    assert dtype_name(written) == "bfloat16"
    assert contracts.differing_fields("logprob", {"head_dtype": written}, {"head_dtype": "bfloat16"}) == []
    rows = contracts.differing_fields("logprob", {"head_dtype": written}, {"head_dtype": "torch.float32"})
    assert rows == [("head_dtype", "numeric", written, "torch.float32")]
    assert tolerances.tolerance("logprob", written) == tolerances.tolerance("logprob", "bfloat16")


@pytest.mark.parametrize("written", ["float8", "", "bfloat", "auto", 16, None])
def test_what_names_no_dtype_is_compared_as_it_is(written: object) -> None:
    assert dtype_name(written) is None
    assert contracts.same(written, written)
    assert not contracts.same(written, "bfloat16")


def test_projections_take_only_values_of_their_type() -> None:
    envelope = {"step": 3, "attempt": True, "rollout_id": 7, "cache": {"cached_tokens": 5}, "turn": "x"}
    assert columns.project(envelope, columns.PROMOTED["cached_tokens"]) == 5
    assert columns.project(envelope, columns.PROMOTED["attempt"]) is None
    assert columns.project(envelope, columns.PROMOTED["turn"]) is None
    assert columns.project(envelope, columns.PROMOTED["rollout_id"]) == "7"
    assert columns.project(envelope, columns.PROMOTED["shard_rank"]) is None


@pytest.mark.parametrize("number", [0, 2])
def test_a_receipt_or_run_of_another_format_is_refused_before_it_is_read(number: int) -> None:
    """Its fields may mean something else: half-understood is worse than refused."""
    receipt = objects.encode_receipt(msgspec.structs.replace(RECEIPT, format=number))
    with pytest.raises(FormatError, match=f"receipt: format {number}; this reader knows format 1"):
        objects.decode_receipt(receipt, "receipt")
    run = canonical_json({"format": number, "another": "shape"})
    with pytest.raises(FormatError, match=f"run.json: format {number}; this reader knows format 1"):
        objects.decode_run(run)
