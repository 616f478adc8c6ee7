"""What a strict sample must carry, and what it lacks: `judge` looks at one sample and gives reasons by code.

The list is data: `rlk_ledger_schemas.modes.STRICT_SAMPLE`, `STRICT_CONTRACT` and `REASONS`. Nothing is filled in: a
field that is missing, defaulted or unreadable is a reason, never a value.
"""

import sys
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from rlk_ledger_schemas.arrays import Array, to_array
from rlk_ledger_schemas.contracts import differing_fields, same
from rlk_ledger_schemas.errors import UsageError
from rlk_ledger_schemas.events import Event
from rlk_ledger_schemas.fingerprints import contract_id, sha256
from rlk_ledger_schemas.modes import CONTRACT_VERSIONS, STRICT_CONTRACT, STRICT_SAMPLE, Needed
from rlk_ledger_schemas.tolerances import tolerance
from rlk_ledger_sdk.columns import columns
from rlk_ledger_sdk.field_types import FILTERS, span_row, wrong_types
from rlk_ledger_sdk.measures import FINITE, first_unmeasured

_KIND = "logprob"


class Reason(msgspec.Struct, frozen=True):
    """Why a sample is not simply admitted: a code of `modes.REASONS`, the field, and what was seen there."""

    code: str
    field: str
    detail: str = ""


class Contract(msgspec.Struct, frozen=True):
    """A log-probability contract that is known here."""

    version: str
    body: dict[str, Any]


class Facts(msgspec.Struct):
    """One sample as plain fields, with those of its rollout log-probabilities."""

    fields: Mapping[str, Any]
    score: Mapping[str, Any]

    def get(self, path: str) -> Any:
        """The value at a field path of STRICT_SAMPLE."""
        if path == "logprobs":
            return self.score.get("values")
        if path == "contract_id":
            return self.score.get("contract_id") or self.fields.get("contract_id")
        value: Any = self.fields
        for name in path.split("."):
            value = value.get(name) if isinstance(value, Mapping) else getattr(value, name, None)
        return value

    def source(self, path: str) -> str | None:
        """What `metadata_source` says of a field, or of the mapping it is in."""
        told = {**_mapping(self.fields.get("metadata_source")), **_mapping(self.score.get("metadata_source"))}
        names = (path, path.rpartition(".")[2], path.partition(".")[0]) + (("values",) if path == "logprobs" else ())
        return next((told[name] for name in names if name in told), None)


def read_facts(sample: Any, scores: Mapping[str, Any] | None) -> Facts | None:
    """The facts of a sample, given as a mapping or an event; None for anything else.

    Its log-probabilities are `logprobs` (values, a mapping or a Logprobs event), else the entry of `scores` under its
    sample id.
    """
    fields = sample.fields() if isinstance(sample, Event) else sample
    if not isinstance(fields, Mapping):
        return None
    score = fields.get("logprobs")
    if score is None and scores is not None:
        score = scores.get(fields.get("sample_id"))  # type: ignore[arg-type]
    if isinstance(score, Event):
        score = score.fields()
    return Facts(fields, score if isinstance(score, Mapping) else {"values": score})


def read_contract(given: Any) -> tuple[str, Contract]:
    """(contract id, contract) of a `contract.declared` event or a mapping {version, body}; raises UsageError."""
    fields = given.fields() if isinstance(given, Event) else given
    if not isinstance(fields, Mapping) or not isinstance(fields.get("body"), Mapping):
        raise UsageError("admit: a contract is a contract.declared event or a mapping with `version` and `body`.")
    version, body = str(fields.get("version", "")), dict(fields["body"])
    return contract_id(_KIND, version, body), Contract(version, body)


def judge(facts: Facts, known: Mapping[str, Contract], own: Contract | None) -> list[Reason]:
    """Everything that keeps a sample out of a strict batch, or the one reason `zero_active_tokens`.

    known: contracts by id. own: the trainer's, whose semantic fields must agree.
    """
    reasons: list[Reason] = []
    mask, tokens = _array(facts, "loss_mask", "uint8", reasons), _array(facts, "response_token_ids", "int32", reasons)
    if mask is not None and not reasons and _nothing_active(facts, tokens, mask):
        return [Reason("zero_active_tokens", "loss_mask", f"{len(mask)} tokens")]
    reasons += [reason for needed in STRICT_SAMPLE if (reason := _lacking(facts, needed)) is not None]
    reasons += [Reason("metadata_malformed", name, what) for name, what in wrong_types(facts.fields)]
    _array(facts, "prompt_token_ids", "int32", reasons)
    reasons += _score(facts, tokens, mask)
    if tokens is not None:
        reasons += _tokens(facts, tokens, mask)
        reasons += _spans(facts, len(tokens))
        reasons += _values(facts, len(tokens), mask)
    reasons += _contract(facts, known, own)
    return reasons


def _nothing_active(facts: Facts, tokens: Array | None, mask: Array) -> bool:
    """Whether the mask is one of this response, was not made up, and leaves no token in the loss."""
    whole = tokens is None or len(tokens) == len(mask)
    return 1 not in mask.data and whole and facts.source("loss_mask") not in ("defaulted", "absent")


def _lacking(facts: Facts, needed: Needed) -> Reason | None:
    sources = []
    for path in needed.fields:
        value, source = facts.get(path), facts.source(path)
        if (
            value is not None
            and not (isinstance(value, str) and not value.strip())
            and source not in ("defaulted", "absent")
        ):
            return None
        sources.append(source if source == "defaulted" and value is not None else None)
    if "defaulted" in sources:
        return Reason("metadata_defaulted", needed.name)
    return Reason("metadata_missing", needed.name)


def _array(facts: Facts, name: str, dtype: str, reasons: list[Reason]) -> Array | None:
    value = facts.get(name)
    if value is None:
        return None
    try:
        out = to_array(value, dtype, name)
        if dtype == "uint8" and out.data.translate(None, b"\0\1"):
            raise UsageError(f"`{name}` must hold 0 and 1 only.")
    except UsageError as error:
        reasons.append(Reason("metadata_malformed", name, str(error)))
        return None
    return out


def _tokens(facts: Facts, tokens: Array, mask: Array | None) -> Iterator[Reason]:
    if mask is not None and len(mask) != len(tokens):
        yield Reason("lengths_differ", "loss_mask", f"{len(mask)} for {len(tokens)} response tokens")
    for name, held in (("token_digest", tokens), ("mask_digest", mask)):
        told = facts.get(name)
        if told is None or held is None:
            continue
        if not isinstance(told, str) or not told.startswith("sha256:"):
            yield Reason("metadata_malformed", name, "only a sha256 digest can be checked against the tokens")
        elif told != sha256(held.data):
            yield Reason("digest_differs", name, f"told {told[:15]}..., held {sha256(held.data)[:15]}...")


def _spans(facts: Facts, size: int) -> Iterator[Reason]:
    spans = facts.get("weight_spans")
    if spans is None:
        return
    try:
        if not isinstance(spans, list | tuple):
            raise TypeError
        rows = sorted(map(span_row, spans))
    except TypeError:
        yield Reason("metadata_malformed", "weight_spans", "a span is {version, start, end}")
        return
    at = 0
    for start, end, version in rows:
        if start != at or end < start or not version:
            yield Reason("spans_incomplete", "weight_spans", f"[{start}, {end}) of {version!r} follows {at}")
            return
        at = end
    if at != size:
        yield Reason("spans_incomplete", "weight_spans", f"{at} of {size} tokens")


def _score(facts: Facts, tokens: Array | None, mask: Array | None) -> Iterator[Reason]:
    """Whether the log-probabilities, where they come as an event or a mapping, are the rollout's of this sample."""
    score, name = facts.score, facts.fields.get("sample_id")
    told = score.get("sample_id")
    if told is not None and told != name:
        yield Reason("metadata_malformed", "logprobs", f"they are of sample {str(told)[:80]!r}")
    if (source := score.get("source")) not in (None, "rollout"):
        yield Reason("metadata_malformed", "logprobs", f"their source is {str(source)[:80]!r}, not rollout")
    for field, held in (("token_digest", tokens), ("mask_digest", mask)):
        if score.get(field) is not None and held is not None and score[field] != sha256(held.data):
            yield Reason("digest_differs", f"logprobs.{field}", "they were taken on other tokens or another mask")
    if score.get("token_ids") is not None:
        yield Reason("digest_differs", "logprobs.token_ids", "they are of other tokens than the sample's")
    own, given = score.get("contract_id"), facts.fields.get("contract_id")
    if own is not None and given is not None and own != given:
        yield Reason("contract_mismatch", "contract_id", "the sample and its log-probabilities name two contracts")
    yield from _classes(score.get("value_class"), tokens, mask)


def _classes(given: Any, tokens: Array | None, mask: Array | None) -> Iterator[Reason]:
    """What the log-probabilities say of their own values."""
    if given is None or tokens is None or mask is None or len(mask) != len(tokens):
        return
    try:
        codes = to_array(given, "uint8", "value_class")
    except UsageError as error:
        yield Reason("metadata_malformed", "logprobs.value_class", str(error))
        return
    if len(codes) != len(tokens):
        yield Reason("lengths_differ", "logprobs.value_class", f"{len(codes)} for {len(tokens)} response tokens")
        return
    bad = next((i for i, (code, on) in enumerate(zip(codes.data, mask.data)) if on and code != FINITE), None)
    if bad is not None:
        yield Reason("values_not_measured", "logprobs", f"their own class is {codes.data[bad]} at position {bad}")


def _values(facts: Facts, size: int, mask: Array | None) -> Iterator[Reason]:
    values = facts.get("logprobs")
    if values is None or mask is None or len(mask) != size:
        return
    values = _numbers(values)
    if facts.score.get("start") or len(values) != size:
        yield Reason("lengths_differ", "logprobs", f"{len(values)} for {size} response tokens")
        return
    np = sys.modules.get("numpy")
    on = mask.tolist() if np is None else np.frombuffer(mask.data, np.uint8)
    try:
        cut = columns([values], [values], [on])
    except UsageError as error:
        yield Reason("metadata_malformed", "logprobs", str(error).removeprefix("diagnose: "))
        return
    bad = first_unmeasured(np, cut.rollout, cut.missing[0])
    if bad is not None:
        yield Reason("values_not_measured", "logprobs", f"{bad[1]} at position {cut.row(0)[bad[0]]}")


def _numbers(values: Any) -> Any:
    """An event's Array as numbers, anything else as it is."""
    return values.tolist() if isinstance(values, Array) else values


def _contract(facts: Facts, known: Mapping[str, Contract], own: Contract | None) -> Iterator[Reason]:
    name, given = facts.get("contract_id"), facts.fields.get("contract")
    contract = known.get(name) if isinstance(name, str) else None
    if contract is None and given is not None:
        try:
            derived, contract = read_contract(given)
        except UsageError as error:
            yield Reason("metadata_malformed", "contract", str(error).removeprefix("admit: "))
            return
        if name is not None and derived != name:
            yield Reason("digest_differs", "contract_id", "the contract sent along has another id")
            return
    if contract is None:
        if name is not None:
            yield Reason("contract_undeclared", "contract_id", str(name)[:80])
        return
    body = contract.body
    yield from (Reason("metadata_missing", f"contract.{field}") for field in STRICT_CONTRACT if body.get(field) is None)
    yield from _tolerated(contract)
    if body.get("mode") == "processed":
        for field in FILTERS:
            asked, declared = facts.get(f"sampling.{field}"), body.get(field)
            if asked is not None and declared is not None and not same(asked, declared):
                yield Reason("contract_mismatch", field, f"sampled with {asked}, the contract says {declared}")
    if own is not None:
        for field, class_, left, right in differing_fields(_KIND, own.body, body):
            if class_ == "semantic":
                yield Reason("contract_mismatch", field, f"this side {left}, the sample {right}")


def _tolerated(contract: Contract) -> Iterator[Reason]:
    if contract.version not in CONTRACT_VERSIONS[_KIND]:
        yield Reason("no_tolerance", "contract.version", repr(contract.version))
    dtype = contract.body.get("compute_dtype")
    if dtype is not None:
        try:
            tolerance(_KIND, dtype)
        except (UsageError, TypeError):
            yield Reason("no_tolerance", "contract.compute_dtype", repr(dtype))


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
