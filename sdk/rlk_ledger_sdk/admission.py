"""Which samples a batch may be trained on: `admit()` before the step.

Off: the batch, unseen. Audit: the batch, and a record of what strict would have done. Strict: a sample that lacks
something leaves the batch (`quarantine`), ends the step (`fail`), or makes the whole batch audit (`downgrade`). Never a
silent mixed batch. A sample without active tokens is not applicable: it stays, outside every count of admitted ones.
"""

import logging
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import msgspec

from rlk_ledger_schemas.errors import AdmissionError, UsageError
from rlk_ledger_schemas.modes import ON_MISSING, REASONS, OnMissing
from rlk_ledger_schemas.tolerances import VERSION
from rlk_ledger_sdk import api
from rlk_ledger_sdk.choices import nearest
from rlk_ledger_sdk.completeness import Contract, Reason, judge, read_contract, read_facts
from rlk_ledger_sdk.modes import Mode
from rlk_ledger_sdk.reference import NOT_RECORDED, Reference

EVENT = "batch.admitted"
Outcome = Literal["admitted", "quarantined", "downgraded", "failed", "observed", "off"]
_SHOWN = 5
_log = logging.getLogger("rlk_ledger")
_warned: set[str] = set()


class Decision(msgspec.Struct, frozen=True):
    """What became of one sample, or under audit would have, and why; `index` is its place in the batch given."""

    index: int
    sample_id: str | None
    status: Literal["admitted", "quarantined", "not_applicable"]
    reasons: tuple[Reason, ...] = ()


class Admission(msgspec.Struct, frozen=True, kw_only=True):
    """The batch to train on and how it came about.

    `batch` is the object given unless samples left it; then a list (or tuple) of the others, in order. `mode` is the
    mode this batch is trained under. `outcome` is `observed` in audit (nothing left), `off` when nothing was looked at.
    """

    batch: Any
    mode: Mode
    outcome: Outcome
    selected: tuple[int, ...] | None = None
    """The places of `batch` in what was given, where samples left it; else None."""
    decisions: tuple[Decision, ...] = ()
    reference: Reference = msgspec.field(default_factory=lambda: NOT_RECORDED)

    @property
    def kept(self) -> tuple[int, ...]:
        """The places of `batch` in what was given: select rows of tensors by it; all of them where nothing left.

        Raises UsageError where nothing was looked at and the batch has no length.
        """
        if self.selected is not None:
            return self.selected
        try:
            return tuple(range(len(self.batch)))
        except TypeError:
            raise UsageError(f"admit: a {type(self.batch).__name__} has no places; give admit() a list.") from None

    @property
    def quarantined(self) -> tuple[Decision, ...]:
        """The samples that lack something."""
        return tuple(d for d in self.decisions if d.status == "quarantined")


def admit(
    samples: Any,
    on_missing: str | None = None,
    *,
    scores: Mapping[str, Any] | None = None,
    contracts: Iterable[Any] = (),
    contract: Any = None,
) -> Admission:
    """The samples of a batch that may be trained on in the mode in force, with a decision about each.

    samples: a list or tuple of mappings with the field names of `rollout.sample`, or RolloutSample events; a mapping
    also holds `logprobs` (the rollout's values, or its `logprobs` event) and `contract_id`. on_missing: quarantine,
    fail or downgrade, for this call (default: the mode's). scores: `logprobs` events by sample id, where samples do not
    hold them. contracts: the contracts the ids stand for, as {version, body} or contract.declared events; a sample may
    send its own as `contract`. contract: this side's own, whose semantic fields must agree.
    Recorded as `batch.admitted`. Raises AdmissionError under strict with `fail`, UsageError under strict for a batch
    that is no list; under audit nothing, except with `on_error=raise`.
    """
    recorder = api.acting()
    mode = recorder.mode
    if mode.consistency == "off":
        return Admission(batch=samples, mode=mode, outcome="off")
    strict = mode.consistency == "strict"
    try:
        policy = _policy(on_missing, mode)
        decisions = _decisions(samples, scores, contracts, contract)
    except UsageError as error:
        if strict:
            raise
        return Admission(batch=samples, mode=mode, outcome="observed", reference=recorder.rejected(EVENT, error))
    except Exception as error:
        if strict:
            raise
        return Admission(batch=samples, mode=mode, outcome="observed", reference=recorder.failed(EVENT, error))
    outcome = _outcome(decisions, policy) if strict else "observed"
    leaves = outcome == "quarantined"
    kept = tuple(d.index for d in decisions if not (leaves and d.status == "quarantined"))
    reference = recorder.emit(EVENT, _event(decisions, outcome, mode, policy))
    if outcome == "failed":
        raise AdmissionError(_offenders(decisions))
    _warn(outcome, decisions)
    return Admission(
        batch=type(samples)(samples[i] for i in kept) if leaves else samples,
        mode=msgspec.structs.replace(mode, consistency="audit") if outcome == "downgraded" else mode,
        outcome=outcome,
        selected=kept if leaves else None,
        decisions=decisions,
        reference=reference,
    )


def _policy(on_missing: str | None, mode: Mode) -> OnMissing:
    if on_missing is None:
        return mode.on_missing
    for known in ON_MISSING:
        if on_missing == known:
            return known
    raise UsageError(f"admit: on_missing {on_missing!r} is unknown; {nearest(str(on_missing), ON_MISSING)}")


def _decisions(samples: Any, scores: Any, contracts: Iterable[Any], contract: Any) -> tuple[Decision, ...]:
    if type(samples) not in (list, tuple):
        raise UsageError(f"admit: samples must be a list or a tuple of mappings, got {type(samples).__name__}.")
    known: dict[str, Contract] = {}
    own = None
    for given in (*contracts, *(() if contract is None else (contract,))):
        name, known_one = read_contract(given)
        known[name] = known_one
    if contract is not None:
        own = read_contract(contract)[1]
    return tuple(_decide(i, sample, scores, known, own) for i, sample in enumerate(samples))


def _decide(index: int, sample: Any, scores: Any, known: dict[str, Contract], own: Contract | None) -> Decision:
    """Fails closed: a sample that cannot even be looked at is quarantined."""
    name = None
    try:
        facts = read_facts(sample, scores)
        if facts is None:
            reasons = [Reason("metadata_malformed", "sample", f"a {type(sample).__name__} is no mapping and no event")]
        else:
            told = facts.fields.get("sample_id")
            name = None if told is None else str(told)
            reasons = judge(facts, known, own)
    except Exception as error:
        reasons = [Reason("metadata_malformed", "sample", f"{type(error).__name__}: {error}"[:200])]
    if not reasons:
        return Decision(index, name, "admitted")
    apart = all(reason.code == "zero_active_tokens" for reason in reasons)
    return Decision(index, name, "not_applicable" if apart else "quarantined", tuple(reasons))


def _outcome(decisions: tuple[Decision, ...], policy: OnMissing) -> Outcome:
    if not any(d.status == "quarantined" for d in decisions):
        return "admitted"
    outcomes: dict[OnMissing, Outcome] = {"quarantine": "quarantined", "fail": "failed", "downgrade": "downgraded"}
    return outcomes[policy]


def _event(decisions: tuple[Decision, ...], outcome: Outcome, mode: Mode, policy: OnMissing) -> dict[str, Any]:
    """The fields of `batch.admitted`; samples with one fate for the same reasons share an entry."""
    status = Counter(d.status for d in decisions)
    groups: dict[tuple[str, tuple[tuple[str, str], ...]], list[str]] = {}
    for d in decisions:
        if d.status != "admitted":
            key = (d.status, tuple((r.code, r.field) for r in d.reasons))
            groups.setdefault(key, []).append(f"#{d.index}" if d.sample_id is None else d.sample_id)
    return {
        "outcome": outcome,
        "samples": len(decisions),
        **{name: status[name] for name in ("admitted", "quarantined", "not_applicable")},
        "mode": mode.pair,
        "on_missing": policy,
        "reasons": dict(Counter(code for d in decisions for code in {r.code for r in d.reasons})),
        "decisions": [
            {
                "status": fate,
                "reasons": [{"code": code, "field": field} for code, field in reasons],
                "sample_ids": names,
            }
            for (fate, reasons), names in groups.items()
        ],
        "tolerance_version": VERSION,
    }


def _offenders(decisions: tuple[Decision, ...]) -> str:
    bad = [d for d in decisions if d.status == "quarantined"]
    named = []
    for d in bad[:_SHOWN]:
        first = d.reasons[0]
        more = f" and {len(d.reasons) - 1} more" if len(d.reasons) > 1 else ""
        detail = f" ({first.detail})" if first.detail else ""
        who = repr(d.sample_id) if d.sample_id is not None else f"sample {d.index}"
        named.append(f"{who}: {first.code} {first.field}{detail}{more}")
    rest = f"; and {len(bad) - _SHOWN} more" if len(bad) > _SHOWN else ""
    step = REASONS[bad[0].reasons[0].code].next_step
    return f"admit: {len(bad)} of {len(decisions)} samples lack what strict needs: {'; '.join(named)}{rest}. {step}"


def _warn(outcome: Outcome, decisions: tuple[Decision, ...]) -> None:
    """The first time in this process that samples leave a batch, or that a batch is downgraded."""
    if outcome in ("quarantined", "downgraded") and outcome not in _warned:
        _warned.add(outcome)
        told = "left the batch" if outcome == "quarantined" else "downgraded it to audit"
        _log.warning("%s These samples %s; later ones are counted in the ledger.", _offenders(decisions), told)
