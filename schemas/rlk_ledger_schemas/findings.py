"""Findings, severities, verdicts and exit codes: one vocabulary for audit, replay, reports and scripts."""

from collections.abc import Iterable
from enum import IntEnum
from typing import Literal

import msgspec

Severity = Literal["error", "gap", "info"]
Verdict = Literal["pass", "fail", "inconclusive", "not_comparable", "not_applicable"]


class Exit(IntEnum):
    """Exit codes of audit and replay, and of `verify` (which says what each means for bytes)."""

    OK = 0
    ERROR = 1
    USAGE = 2
    GAP = 3


class FindingType(msgspec.Struct, frozen=True):
    """A finding id's fixed part: severity, one-line meaning, evidence it needs, query that reproduces it, next step."""

    severity: Severity
    meaning: str
    needs: str
    query: str
    next_step: str


def _f(severity: Severity, meaning: str, needs: str, query: str, next_step: str) -> FindingType:
    return FindingType(severity, meaning, needs, query, next_step)


_DRIFT = "select * from drift where run_id = $run order by abs_dlogp desc limit 20"
_VALUES = "select source, value_class, count(*) from tokens where run_id = $run group by all"
_WEIGHTS = "select * from weights where run_id = $run order by weight_version, type"
_LOGPROBS = "select sample_id, source, pass_id, weight_version, token_digest from logprobs where run_id = $run"

FINDINGS: dict[str, FindingType] = {
    "contract.differs": _f(
        "error",
        "the two sides compute under different numeric contracts",
        "contract.declared of both sides",
        "select * from events where type = 'contract.declared' and run_id = $run",
        "Make the named field equal on both sides, or declare what really runs.",
    ),
    "numerics.differ": _f(
        "info",
        "the two engines round at different places or in different precisions; replay measures what that costs",
        "contract.declared of both sides",
        "select * from events where type = 'contract.declared' and run_id = $run",
        "Within the measured floor nothing is wrong; above it, make the named field equal on both sides first.",
    ),
    "weights.not_loaded": _f(
        "error",
        "an engine kept its old weights under a new version",
        "weights.published, weights.loaded",
        _WEIGHTS,
        "Check the weight sync of the named engine: it reported a version whose bytes it does not hold.",
    ),
    "weights.differ": _f(
        "error",
        "an engine's weights under a version are not the published ones",
        "weights.published, weights.loaded",
        _WEIGHTS,
        "Compare the per-tensor digests of the named version and re-send the weights.",
    ),
    "weights.skipped": _f(
        "error",
        "tensors were left out of a weight sync",
        "weights.published or weights.loaded with `skipped`",
        _WEIGHTS,
        "Add the named tensors to the conversion map; they still hold their initial values.",
    ),
    "tokens.differ": _f(
        "error",
        "the sides scored different tokens for one sample",
        "token digests or token ids of both sides",
        _LOGPROBS,
        "Send token ids instead of text between engine and trainer; look at the first differing index.",
    ),
    "mask.differs": _f(
        "error",
        "the sides used different loss masks for one sample",
        "mask digests of both sides",
        _LOGPROBS,
        "Use one mask on both sides; tool and environment tokens must be masked on both.",
    ),
    "samples.ambiguous": _f(
        "error",
        "one sample id stands for two token lists",
        "rollout.sample",
        "select sample_id, count(distinct token_digest) as lists from samples where run_id = $run "
        "group by 1 having lists > 1",
        "Make sample ids unique per sampled response, or record `attempt`.",
    ),
    "alignment.shift": _f(
        "error",
        "one side's values belong to the neighbouring token",
        "logprobs of both sides",
        _DRIFT,
        "Shift the named side by the named lag: entry i must score token i given the tokens before it.",
    ),
    "sampling.support": _f(
        "error",
        "one side renormalised over the sampled support and the other did not",
        "kept_mass",
        _DRIFT,
        "Apply top-p / top-k / min-p renormalisation on both sides or on neither.",
    ),
    "layout.sensitive": _f(
        "info",
        "two passes of one side over the same weights differ by their batch layout",
        "two training passes of one weight version",
        "select * from logprobs where source = 'training' and run_id = $run order by sample_id, pass_id",
        "Score both passes in one layout, or take this difference as the side's own noise.",
    ),
    "drift.split": _f(
        "error",
        "drift is concentrated in one level of a recorded dimension",
        "rollout and training logprobs, the dimension",
        _DRIFT,
        "Look at what the named level does differently; it explains the drift better than chance.",
    ),
    "drift.attributed": _f(
        "error",
        "replay places the drift's excess over the noise floor on a side",
        "replay arms and floors",
        "select * from verdicts where run_id = $run",
        "Fix the named side: its distance from the reference exceeds its own floor.",
    ),
    "drift.within_floor": _f(
        "info",
        "drift is within the measured noise floor of the two engines",
        "replay arms and floors",
        "select * from verdicts where run_id = $run",
        "Nothing to fix; this is the noise of honest low-precision arithmetic.",
    ),
    "drift.zero": _f(
        "info",
        "nearly all values of the two sides are bitwise equal",
        "logprobs of both sides, determinism evidence",
        _DRIFT,
        "If the engines are bitwise consistent, record the evidence; otherwise check that one side was not copied.",
    ),
    "off_policy.lag": _f(
        "info",
        "values of different weight versions were kept out of drift",
        "weight spans and training weight versions",
        "select lag, count(*) from off_policy where run_id = $run group by 1",
        "Nothing to fix when updates are asynchronous by design; the count stands beside drift.",
    ),
    "noise.clip_below_floor": _f(
        "error",
        "the clip band is narrower than the measured noise",
        "a measured floor",
        _DRIFT,
        "Widen the clip band or lower the noise; clipping is driven by rounding.",
    ),
    "backend.not_in_force": _f(
        "error",
        "a requested setting or backend is not the one that ran",
        "knob.applied, operator.decided",
        "select * from knobs where run_id = $run",
        "Read the fallback reason; the requested guarantee does not hold for this run.",
    ),
    "replicas.differ": _f(
        "error",
        "ranks that must agree recorded different values",
        "logprobs of replicated ranks",
        _LOGPROBS,
        "Check the named ranks' weights and collectives.",
    ),
    "metadata.defaulted": _f(
        "gap",
        "a field was filled with a default instead of being measured",
        "metadata_source",
        "select * from samples where run_id = $run",
        "Record the field from the engine; a defaulted value proves nothing.",
    ),
    "values.nan": _f(
        "error",
        "NaN was recorded at active tokens",
        "logprobs",
        _VALUES,
        "Find the first NaN in the named sample; the numbers after it are not measurements.",
    ),
    "values.inf": _f(
        "error",
        "infinite log-probabilities at active tokens",
        "logprobs",
        _VALUES,
        "A sampled token cannot have probability zero; check masks and top-p on the named side.",
    ),
    "values.sentinel": _f(
        "error",
        "a clamp sentinel stands where a log-probability should",
        "logprobs",
        _VALUES,
        "Record the non-finite value itself; the sentinel hides it.",
    ),
    "values.defaulted": _f(
        "error",
        "exact constants stand where the other side measured something else",
        "logprobs of both sides",
        _VALUES,
        "Missing log-probabilities were filled in; record them as missing.",
    ),
    "values.copied": _f(
        "error",
        "a run of one side's values is a bitwise copy of the other's",
        "logprobs of both sides",
        _VALUES,
        "One side did not compute these values; find where they were copied.",
    ),
    "values.missing": _f(
        "gap",
        "log-probabilities are missing at active tokens",
        "logprobs",
        _VALUES,
        "Record every active token, or mask it on both sides.",
    ),
    "values.impossible": _f(
        "error",
        "log-probabilities above zero",
        "logprobs",
        _VALUES,
        "Check the normalisation on the named side; probabilities above one are not probabilities.",
    ),
    "routes.incomplete": _f(
        "gap",
        "routing replay did not cover every token",
        "routed_experts",
        "select sample_id from samples where run_id = $run",
        "Record and replay the experts of every token, padded rows included.",
    ),
    "group.duplicates": _f(
        "error",
        "all responses of a group are identical",
        "rollout.sample with group_id",
        "select group_id, count(*) samples, count(distinct response_token_ids__int32) different "
        "from samples where run_id = $run group by 1",
        "Give every sample of a group its own seed.",
    ),
    "coverage.unobserved": _f(
        "gap",
        "active tokens were never seen on one side",
        "logprobs of both sides",
        _LOGPROBS,
        "Instrument the named source: not observed is not clean.",
    ),
    "coverage.zero_active_tokens": _f(
        "gap",
        "no active token to compare",
        "loss masks",
        "select sample_id from samples where run_id = $run",
        "Check the loss mask: nothing was compared, so nothing was shown.",
    ),
    "evidence.shards_missing": _f(
        "gap",
        "ranks of a sharded score are missing",
        "logprobs with `shard`",
        _LOGPROBS,
        "Record every rank of the named source.",
    ),
    "evidence.incomplete": _f(
        "gap",
        "events this answer needs are missing",
        "gap and writer.lost events",
        "select * from gaps where run_id = $run",
        "See the named writer and range; what was lost cannot be judged.",
    ),
    "evidence.pruned": _f(
        "gap",
        "samples or scores of the run were deleted on purpose; the answer is about what is left",
        "segments.pruned events",
        "select * from events where type = 'segments.pruned' and run_id = $run",
        "Nothing to fix: the named steps cannot be judged any more. `rlk-ledger hold` keeps a run from being pruned.",
    ),
    "reference.broken": _f(
        "error",
        "the reference disagrees with itself",
        "the both_reference arm",
        "select * from cases where run_id = $run",
        "Run `kernels check`; no replay result is believed until decode equals prefill bitwise.",
    ),
    "reference.disagrees": _f(
        "gap",
        "both sides are farther from the reference than from each other",
        "replay arms",
        "select * from cases where run_id = $run",
        "Check the reference's weights and semantics; it may score another model.",
    ),
    "variant.did_not_apply": _f(
        "gap",
        "what was asked for in a replay did not run",
        "operator decisions of the replay",
        "select * from cases where run_id = $run",
        "See the resolution trace; a requested backend is not an executed one.",
    ),
    "explain.reproduced": _f(
        "info",
        "a variant of the reference reproduces the excess",
        "explain cases",
        "select * from cases where run_id = $run",
        "The named variant is what the side runs; change it or declare it.",
    ),
    "replay.redacted": _f(
        "gap",
        "the run's token ids are hashed or were left out, so that nobody can score them again",
        "run.opened with `redaction`",
        "select redaction from runs where run_id = $run",
        "`audit` and `drift` judge what was recorded. To replay, record without redaction where the data may be kept.",
    ),
    "tokens.redacted": _f(
        "info",
        "token ids and their digests were left out: whether the sides scored the same tokens is not on record",
        "run.opened with `redaction = drop`",
        "select redaction from runs where run_id = $run",
        "Redaction `hash` keeps tokens comparable without showing them.",
    ),
    "replay.failed": _f(
        "gap",
        "an arm of the replay could not be measured",
        "case.attempted",
        "select * from cases where run_id = $run",
        "See the reason; what was not measured is not clean.",
    ),
}


def exit_code(severities: Iterable[Severity]) -> Exit:
    """ERROR where any finding is an error, else GAP where any is a gap, else OK."""
    seen = set(severities)
    return Exit.ERROR if "error" in seen else Exit.GAP if "gap" in seen else Exit.OK
