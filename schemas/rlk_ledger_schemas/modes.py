"""fast x consistency: what each pair means, and the reason codes with which strict fails closed.

Precedence, so that no two readers disagree: `fast=strict` decides first (no optimised backend is an error, whatever
consistency says), then `consistency=strict` filters to what preserves the contract, then what is left may fall back.
`behaviour` applies these three steps in this order; nobody else decides.
"""

from typing import Literal

import msgspec

from rlk_ledger_schemas.errors import UsageError

Fast = Literal["off", "auto", "strict"]
Consistency = Literal["off", "audit", "strict"]
OnMissing = Literal["quarantine", "fail", "downgrade"]
Bucket = Literal["contract_preserving", "opportunistic", "reference", "native"]

FAST: tuple[Fast, ...] = ("off", "auto", "strict")
CONSISTENCY: tuple[Consistency, ...] = ("off", "audit", "strict")
ON_MISSING: tuple[OnMissing, ...] = ("quarantine", "fail", "downgrade")
OPTIMISED: frozenset[Bucket] = frozenset({"contract_preserving", "opportunistic"})


class Behaviour(msgspec.Struct, frozen=True):
    """What one pair means.

    buckets: which kinds of backend may run, best first; empty is impossible. preserve: whatever runs must preserve the
    declared contract. without: what happens when no backend of `buckets` is eligible: nothing to choose (`native`), a
    warning and the native operator (`fall_back`), or an error. record: events and diagnostics are recorded. admission:
    samples pass unseen, are judged and pass, or pass only when complete.
    """

    buckets: tuple[Bucket, ...]
    preserve: bool
    without: Literal["native", "fall_back", "error"]
    record: bool
    admission: Literal["none", "observed", "enforced"]


def behaviour(fast: Fast, consistency: Consistency) -> Behaviour:
    """The behaviour of a pair; raises UsageError for a value that is no mode."""
    if fast not in FAST or consistency not in CONSISTENCY:
        raise UsageError(
            f"no mode (fast={fast!r}, consistency={consistency!r}); "
            f"fast is one of {', '.join(FAST)}, consistency one of {', '.join(CONSISTENCY)}."
        )
    strict = consistency == "strict"
    buckets: tuple[Bucket, ...] = ("native",)
    without: Literal["native", "fall_back", "error"] = "native"
    if fast == "strict":
        buckets, without = ("contract_preserving", "opportunistic"), "error"
    elif fast == "auto":
        buckets, without = ("contract_preserving", "opportunistic", "native"), "fall_back"
    if strict:
        buckets = tuple(b for b in buckets if b not in ("opportunistic", "native")) or ("native",)
        if fast == "auto":
            buckets = (*buckets, "reference")
        without = "error"
    admission: Literal["none", "observed", "enforced"] = "enforced" if strict else "observed"
    if consistency == "off":
        admission = "none"
    return Behaviour(buckets, preserve=strict, without=without, record=consistency != "off", admission=admission)


class Reason(msgspec.Struct, frozen=True):
    """A reason code: what is judged (a sample, an operator, a run), what it means, what to do next."""

    scope: Literal["sample", "operator", "run"]
    meaning: str
    next_step: str


REASONS: dict[str, Reason] = {
    "metadata_missing": Reason(
        "sample", "a field that strict needs was not given, or is declared absent", "Record it where it is known."
    ),
    "metadata_defaulted": Reason(
        "sample", "a field that strict needs was filled with a default", "Record what the engine says, or nothing."
    ),
    "metadata_malformed": Reason("sample", "a field cannot be read as what it should be", "See the field's type."),
    "lengths_differ": Reason(
        "sample", "a per-token field has another length than the response", "Send one entry for each response token."
    ),
    "digest_differs": Reason(
        "sample", "the tokens or the mask are not those the digest was made of", "Send token ids, never text."
    ),
    "spans_incomplete": Reason(
        "sample",
        "the weight spans do not cover the response exactly once",
        "Record one span for each version that sampled a part of the response.",
    ),
    "values_not_measured": Reason(
        "sample",
        "an active token's log-probability is no measurement (missing, NaN, infinite, a clamp, above zero)",
        "Have the engine return the log-probability of every sampled token.",
    ),
    "contract_undeclared": Reason(
        "sample",
        "nothing here knows the contract the log-probabilities name",
        "Send it with the sample as `contract`, or hand it to admit(contracts=...).",
    ),
    "contract_mismatch": Reason(
        "sample",
        "a semantic field of the contract contradicts the sample's sampling or the trainer's own contract",
        "Make the named field equal on both sides, or declare what really runs.",
    ),
    "no_tolerance": Reason(
        "sample",
        "no tolerance exists for this dtype, contract and contract version",
        "Use a dtype and contract version of the tolerance table; no default exists.",
    ),
    "zero_active_tokens": Reason(
        "sample", "the loss mask selects no token: not applicable, outside every aggregate", "Check the loss mask."
    ),
    "no_optimised_backend": Reason(
        "operator", "fast is strict and no optimised backend is eligible", "See the rejected backends' reasons."
    ),
    "contract_not_preserved": Reason(
        "operator", "the backend does not preserve the declared contract", "Choose one that does, or relax the mode."
    ),
    "required_field_missing": Reason(
        "operator",
        "the backend's descriptor needs a field the request does not have; only `*` is a wildcard",
        "State the field in the request.",
    ),
    "capability_missing": Reason(
        "operator",
        "the backend's descriptor does not cover a field of the request",
        "Choose a backend that declares it, or change the request.",
    ),
    "backend_unavailable": Reason(
        "operator",
        "what the backend needs (a distribution, a device, its own module) is not here",
        "See what the rejected backend says would enable it.",
    ),
    "mode_excludes": Reason(
        "operator",
        "the mode, or the backend's lifecycle, does not let this kind of backend run",
        "Choose another mode, or ask for an experimental backend by its name.",
    ),
    "declaration_broken": Reason(
        "operator",
        "an operator's folder or a plugin holds no declaration that can be used",
        "Repair or uninstall what the rejected entry names.",
    ),
    "silent_fallback": Reason(
        "operator", "the backend that ran is not the one that was decided", "Read the operator's decision."
    ),
    "stale_registry": Reason(
        "operator", "the registry changed after the decision was made", "Decide again on the current registry."
    ),
    "unobservable_knob": Reason(
        "run", "a setting the guarantee depends on cannot be read back", "Use an engine that shows it."
    ),
    "strict_downgraded": Reason(
        "run",
        "strict was asked for and a batch was trained on under audit",
        "Complete the named fields, or ask for audit.",
    ),
}
"""Every reason code. `not_applicable` is a status, not a failure; all other sample codes keep a sample out."""


class Needed(msgspec.Struct, frozen=True):
    """One thing a strict sample must carry: the fields of which one suffices, and why it is needed."""

    fields: tuple[str, ...]
    why: str

    @property
    def name(self) -> str:
        """How a decision names it."""
        return " or ".join(self.fields)


STRICT_SAMPLE: tuple[Needed, ...] = (
    Needed(("sample_id",), "names the sample in both sides' records"),
    Needed(("prompt_token_ids", "prompt_id"), "what the response was conditioned on"),
    Needed(("response_token_ids",), "what was sampled"),
    Needed(("loss_mask",), "which tokens enter the loss"),
    Needed(("token_digest",), "shows that the trainer's tokens are the engine's"),
    Needed(("sampling.temperature",), "the log-probabilities are of this distribution"),
    Needed(("weight_spans",), "which weights sampled each token"),
    Needed(("engine",), "who sampled"),
    Needed(("logprobs",), "what the trainer's values are compared with"),
    Needed(("contract_id",), "what the log-probabilities mean"),
)
"""What a strict sample must carry. `logprobs` and `contract_id` are those of its rollout `logprobs` event."""

STRICT_CONTRACT: tuple[str, ...] = ("mode", "temperature", "compute_dtype")
"""Fields a log-probability contract must declare before a tolerance can be looked up."""

CONTRACT_VERSIONS: dict[str, frozenset[str]] = {"logprob": frozenset({"1"})}
"""Contract versions the tolerances of `tolerances.VERSION` were made for."""
