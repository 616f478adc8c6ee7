"""From a Batch to events of one run, once: what the run holds already is skipped, what contradicts it is refused.

A sample is the same when its id and its response tokens are; a score when its sample, source, pass and bits at the
tokens of the loss are (two dumps of one pass may differ at tool tokens: 0.0 in one, a value in the other). So a second
import of the same files adds nothing, an import that was cut is completed by running it again, and training values may
come after the rollout's.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rlk_ledger.build import event
from rlk_ledger.history import as_numpy
from rlk_ledger.importers.alone import alone
from rlk_ledger.importers.declared import Declared
from rlk_ledger.importers.model import Batch, Imported, Layout, Mask, Scored, Values
from rlk_ledger.ledger import Ledger, open_or_begin
from rlk_ledger_schemas.errors import FormatError, UsageError
from rlk_ledger_schemas.fingerprints import contract_id, mask_digest, sha256, token_digest
from rlk_ledger_sdk.config import spool_folder

_VERSION = "1"
_BUDGET = 1 << 50
"""Bytes the private spool may take: an import that runs out of room must fail, not drop events."""

Emit = tuple[str, dict[str, Any]]
ScoreKey = tuple[str, str, str | None]


@dataclass(slots=True)
class Held:
    """What a run holds: response token digests by sample, digests of values by score, layouts, contracts, findings.

    A redacted run does not hold the ids: the digest of its samples is None, and only their names tell them apart.
    """

    samples: dict[str, str | None] = field(default_factory=dict)
    scores: dict[ScoreKey, str] = field(default_factory=dict)
    layouts: set[str] = field(default_factory=set)
    findings: set[str] = field(default_factory=set)
    contracts: set[str] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class Written:
    """What an import added to a run, and how many of its events were there already."""

    run_id: str
    samples: int
    scores: Mapping[str, int]
    present: int


def default_run_id(batch: Batch) -> str:
    """The format and a digest of the files, so that the same files always mean the same run."""
    digest = sha256("".join(sorted(s.sha256 for s in batch.sources)).encode()).partition(":")[2]
    return f"{batch.format}-{digest[:12]}"


def write(url: str, run_id: str, batch: Batch, declared: Declared, progress: Callable[[int, int], None]) -> Written:
    """Records a batch in a run of the ledger at `url` (made when absent); all of it is committed, or none is begun.

    Another import into that run is waited for. Raises UsageError where the run holds something else under the same
    name, StoreError, ConfigError, SpoolError.
    """
    ledger = open_or_begin(url)
    with alone(spool_folder(), ledger.url, run_id):
        return _write(ledger, run_id, batch, declared, progress)


def _write(
    ledger: Ledger, run_id: str, batch: Batch, declared: Declared, progress: Callable[[int, int], None]
) -> Written:
    held = read_held(ledger, run_id)
    events = list(_new_events(batch, declared, held))
    _check(run_id, events)
    count = sum(1 for kind, _ in events if kind == "rollout.sample")
    scores: dict[str, int] = {}
    for kind, fields in events:
        if kind == "logprobs":
            scores[fields["source"]] = scores.get(fields["source"], 0) + 1
    total = len(batch.samples) + sum(len(sample.scores) for sample in batch.samples)
    if events:
        _record(ledger, run_id, batch, events, progress)
    return Written(run_id, count, scores, total - count - sum(scores.values()))


def _record(
    ledger: Ledger, run_id: str, batch: Batch, events: list[Emit], progress: Callable[[int, int], None]
) -> None:
    files = {source.name: f"sha256:{source.sha256}" for source in batch.sources}
    environment = {"import": {"format": batch.format, "files": files}}
    options: dict[str, Any] = {"budget_bytes": _BUDGET, "environment": environment, "engine": {"name": batch.format}}
    total, done = sum(map(_size, events)), 0
    with ledger.writer(run_id, role="import", all_or_nothing=True, **options) as recorder:
        for kind, fields in events:
            done += _size((kind, fields))
            recorder.record(kind, **fields)
            progress(done, total)


def _size(emit: Emit) -> int:
    """Bytes of an event's arrays."""
    return sum(value.nbytes for value in emit[1].values() if isinstance(value, np.ndarray))


def _check(run_id: str, events: list[Emit]) -> None:
    """Makes every event once, so that none can fail while they are recorded; raises EventError, FormatError."""
    for kind, fields in events:
        try:
            event(run_id, "0" * 32, 0, kind, **fields)
        except (TypeError, ValueError, OverflowError) as error:
            if isinstance(error, UsageError):
                raise
            sample = fields.get("sample_id", "")
            raise FormatError(f"{kind} {sample} cannot be stored: {error}.") from None


def read_held(ledger: Ledger, run_id: str) -> Held:
    """What run `run_id` holds that an import could repeat; nothing when there is no such run."""
    held = Held()
    if run_id not in ledger.runs():
        return held
    masks: dict[str, Mask] = {}
    values: dict[ScoreKey, Values] = {}
    kinds = {"rollout.sample", "logprobs", "batch.layout", "finding.raised"}
    for _, _, fields, arrays in ledger.read_events(run_id, kinds):
        kind = fields["type"]
        if kind == "rollout.sample" and fields.get("attempt") is None:
            ids = arrays.get("response_token_ids")
            held.samples[fields["sample_id"]] = None if ids is None or ids.dtype != "int32" else sha256(ids.data)
            masks[fields["sample_id"]] = as_numpy(arrays["loss_mask"])
        elif kind == "logprobs" and not fields.get("start"):
            values[fields["sample_id"], fields["source"], fields.get("pass_id")] = as_numpy(arrays["values"])
        elif kind == "batch.layout":
            held.layouts.add(fields["layout_id"])
        elif kind == "finding.raised":
            held.findings.add(_finding_key(fields))
    for key, held_values in values.items():
        held.scores[key] = _digest(held_values, masks.get(key[0]))
    return held


def _digest(values: Values, mask: Mask | None) -> str:
    """Of the values at the tokens of the loss; of all where the mask does not fit them."""
    return sha256((values if mask is None or len(mask) != len(values) else values[mask != 0]).tobytes())


def _new_events(batch: Batch, declared: Declared, held: Held) -> Iterator[Emit]:
    for layout in batch.layouts:
        if layout.fields["layout_id"] not in held.layouts:
            yield "batch.layout", _layout(layout)
    for sample in batch.samples:
        known = held.samples.get(sample.sample_id)
        if sample.sample_id not in held.samples:
            yield "rollout.sample", _sample(sample, declared)
        elif known not in (None, token_digest(sample.response)):
            raise UsageError(
                f"the run already holds other tokens for sample {sample.sample_id}: these dumps are of another run, so "
                "import them with another --run-id."
            )
        for score in sample.scores:
            yield from _score(sample, score, declared, held)
    for finding in batch.findings:
        fields = finding.to_dict()
        if _finding_key(fields) not in held.findings:
            yield "finding.raised", {"subject": "import", **fields}


def _score(sample: Imported, score: Scored, declared: Declared, held: Held) -> Iterator[Emit]:
    key = (sample.sample_id, score.source, score.fields.get("pass_id"))
    known = held.scores.get(key)
    if known is not None:
        if known != _digest(score.values, sample.mask):
            raise UsageError(
                f"the run already holds other {score.source} values for sample {sample.sample_id}: import these with "
                "another --run-id."
            )
        return
    body = declared.body(score.source)
    contract = contract_id("logprob", _VERSION, body)
    if contract not in held.contracts:
        held.contracts.add(contract)
        fields = {"kind": "logprob", "version": _VERSION, "body": body}
        yield "contract.declared", {**fields, "labels": declared.labels(score.source)}
    yield "logprobs", _logprobs(sample, score, contract, declared)


def _sample(sample: Imported, declared: Declared) -> dict[str, Any]:
    fields: dict[str, Any] = dict(sample.fields)
    labels = {**fields.pop("labels", {}), **sample.origin.labels}
    metadata = dict(sample.metadata)
    version = declared.weight_version("rollout", sample.step)
    if version is not None and "weight_spans" not in fields:
        fields["weight_spans"] = [{"version": version, "start": 0, "end": len(sample.response)}]
        metadata["weight_spans"] = "defaulted"
    return {
        **fields,
        "sample_id": sample.sample_id,
        "step": sample.step,
        "rollout_id": sample.rollout_id,
        "prompt_token_ids": sample.prompt,
        "response_token_ids": sample.response,
        "loss_mask": sample.mask,
        "token_digest": token_digest(sample.response),
        "mask_digest": mask_digest(sample.mask),
        "metadata_source": metadata,
        "labels": labels,
    }


def _logprobs(sample: Imported, score: Scored, contract: str, declared: Declared) -> dict[str, Any]:
    fields = {name: value for name, value in score.fields.items() if value is not None}
    metadata = dict(score.metadata)
    version = declared.weight_version(score.source, sample.step)
    if version is not None and "weight_version" not in fields:
        fields["weight_version"] = version
        metadata["weight_version"] = "defaulted"
    ids = sample.response if score.ids is None else score.ids
    mask = sample.mask if score.mask is None else score.mask
    if not np.array_equal(ids, sample.response):
        fields["token_ids"] = ids
    return {
        **fields,
        "sample_id": sample.sample_id,
        "step": sample.step,
        "rollout_id": sample.rollout_id,
        "source": score.source,
        "values": score.values,
        "value_class": score.value_class,
        "entropy": score.entropy,
        "contract_id": contract,
        "token_digest": token_digest(ids),
        "mask_digest": mask_digest(mask),
        "metadata_source": metadata,
        "labels": score.origin.labels,
    }


def _layout(layout: Layout) -> dict[str, Any]:
    fields = {name: value for name, value in layout.fields.items() if value is not None}
    return {**fields, "step": layout.step, "labels": layout.origin.labels}


def _finding_key(fields: Mapping[str, Any]) -> str:
    where = sorted((str(k), str(v)) for k, v in fields["where"].items())
    return f"{fields['finding_id']} {where}"
