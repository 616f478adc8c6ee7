"""A finished `Sample` as events: `rollout.sample` and the engine's `logprobs`.

Stands on the fields of slime's and vime's `Sample` dataclass (slime/utils/types.py, vime/utils/types.py, autumn 2026):
group_index, index, tokens, response_length, loss_mask, weight_versions, rollout_log_probs, reward, status, session_id,
remove_sample, spec_info, prefix_cache_info, rollout_routed_experts, rollout_top_p_token_ids and _offsets. A field that
is missing is `absent`, one that is new is ignored.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from rlk_ledger_schemas.errors import EventError
from rlk_ledger_schemas.metrics import VALUE_CLASSES
from rlk_ledger_sdk.api import current, record
from rlk_ledger_sdk.declared import declare
from rlk_ledger_sdk.integrations.slime.framework import Framework
from rlk_ledger_sdk.integrations.slime.spans import Span

_MISSING = VALUE_CLASSES.index("missing")
_STATUS = ("completed", "truncated", "aborted", "failed")
_ALIGNMENT = "token_i_given_before_i"


def record_sample(
    framework: Framework,
    args: Any,
    sample: Any,
    spans: Sequence[Span] | None,
    sampling_params: Mapping[str, Any] | None = None,
    attempt: int | None = None,
) -> str | None:
    """Records one sample and its rollout log-probabilities; returns its sample id, or None where it was refused."""
    try:
        fields = sample_fields(framework, args, sample, spans, sampling_params)
    except EventError as error:
        current().rejected("rollout.sample", error)
        return None
    common = {} if attempt is None else {"attempt": attempt}
    record("rollout.sample", **fields, **common)
    values = plain(getattr(sample, "rollout_log_probs", None))
    if values is not None and fields["response_token_ids"]:
        contract = declare("logprob", rollout_contract(framework, args, sampling_params))
        scored = logprob_fields(framework, fields, values)
        if scored is not None:
            record("logprobs", source="rollout", contract_id=contract, **scored, **common)
    return str(fields["sample_id"])


def sample_fields(
    framework: Framework,
    args: Any,
    sample: Any,
    spans: Sequence[Span] | None,
    sampling_params: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """The fields of `rollout.sample`; raises EventError where tokens, mask and length contradict each other."""
    tokens, length = plain(getattr(sample, "tokens", None)), getattr(sample, "response_length", None)
    if tokens is None or not isinstance(length, int) or not 0 <= length <= len(tokens):
        have = "no tokens" if tokens is None else f"{len(tokens)} tokens"
        raise EventError(
            f"{framework.name}: sample {sample_id(sample)} has {have} for a response_length of {length!r}."
        )
    mask = plain(getattr(sample, "loss_mask", None))
    if mask is not None and len(mask) != length:
        raise EventError(
            f"{framework.name}: sample {sample_id(sample)} has {len(mask)} loss_mask entries for {length} response "
            f"tokens; the framework refuses it too."
        )
    if getattr(sample, "remove_sample", False):
        mask = [0] * length  # what the framework's conversion makes of it
    start = len(tokens) - length
    source = {"engine": "absent", "finish_reason": "absent"}
    source["loss_mask"] = "derived" if mask is None else "measured"  # the framework trains on ones where there is none
    source["sampling"] = "derived" if sampling_params is None else "measured"
    source["weight_spans"] = "derived" if spans else "absent"
    fields: dict[str, Any] = {
        "sample_id": sample_id(sample),
        "prompt_token_ids": tokens[:start],
        "response_token_ids": tokens[start:],
        "loss_mask": [1] * length if mask is None else mask,
        "group_id": text(getattr(sample, "group_index", None)),
        "session_id": text(getattr(sample, "session_id", None)),
        "status": status_of(sample),
        "reward": reward_of(args, sample),
        "sampling": sampling_of(args, sampling_params),
        "weight_spans": [{"version": v, "start": a, "end": b} for v, a, b in spans or ()] or None,
        "stamp_rule": "version the engine named when a generation call returned" if spans else None,
        "model": text(getattr(args, "hf_checkpoint", None)),
        **engine_counts(sample),
        **support_of(sample, length),
        "metadata_source": source,
    }
    if fields["reward"] is None:
        source["reward"] = "absent"
    return {name: value for name, value in fields.items() if value is not None}


def sample_id(sample: Any) -> str:
    """The framework's running index of the sample; raises EventError where it has none."""
    index = getattr(sample, "index", None)
    if index is None:
        raise EventError("a Sample without `index` cannot be told from another; set it in the data source.")
    return str(index)


def logprob_fields(framework: Framework, fields: Mapping[str, Any], values: list[Any]) -> dict[str, Any] | None:
    """The fields of the rollout `logprobs`, or None (and a stated gap) where the lengths differ.

    The frameworks put 0.0 at masked tool and environment tokens, which no engine scored: those are `missing`.
    """
    length, mask = len(fields["response_token_ids"]), fields["loss_mask"]
    if len(values) != length:
        error = EventError(
            f"{framework.name}: sample {fields['sample_id']} has {len(values)} rollout_log_probs for {length} response "
            f"tokens; record one a token, None where there is none."
        )
        current().rejected("logprobs", error)
        return None
    out: dict[str, Any] = {"sample_id": fields["sample_id"], "values": values}
    if None in values or not all(mask):
        classes = [_MISSING if v is None or (v == 0.0 and not m) else 0 for v, m in zip(values, mask)]
        out["values"] = [float("nan") if v is None else v for v in values]
        if any(classes):
            out["value_class"] = classes
    versions = {span["version"] for span in fields.get("weight_spans") or ()}
    if len(versions) == 1:
        out["weight_version"] = versions.pop()
    return out


def rollout_contract(framework: Framework, args: Any, sampling_params: Mapping[str, Any] | None) -> dict[str, Any]:
    """What the engine's log-probabilities include; what cannot be told is left out."""
    sampling = sampling_of(args, sampling_params)
    body: dict[str, Any] = {"mode": framework.rollout_mode(args), "alignment": _ALIGNMENT, "execution_path": "decode"}
    body["temperature"] = sampling.get("temperature")
    if framework.filters_enter:
        body |= {name: sampling.get(name) for name in ("top_p", "top_k", "min_p")}
    return body


def sampling_of(args: Any, params: Mapping[str, Any] | None) -> dict[str, Any]:
    """Sampling parameters of the request, else of the job's arguments."""
    given = params or {}
    found: dict[str, Any] = {}
    for name in ("temperature", "top_p", "top_k", "min_p"):
        value = given.get(name) if name in given else getattr(args, f"rollout_{name}", None)
        if value is not None:
            found[name] = value
    seed = given.get("sampling_seed", given.get("seed"))
    if seed is not None:
        found["seed"] = seed
    if (n := getattr(args, "n_samples_per_prompt", None)) is not None:
        found["n"] = n
    return found


def status_of(sample: Any) -> str | None:
    """completed, truncated, aborted or failed; None for a sample still pending."""
    status = getattr(sample, "status", None)
    value = getattr(status, "value", status)
    return value if value in _STATUS else None


def reward_of(args: Any, sample: Any) -> float | None:
    """The reward the job trains on, once there is one."""
    reward = getattr(sample, "reward", None)
    if isinstance(reward, Mapping):
        reward = reward.get(getattr(args, "reward_key", None))
    try:
        return None if reward is None else float(reward)
    except (TypeError, ValueError):
        return None


def engine_counts(sample: Any) -> dict[str, Any]:
    """Prefix-cache, speculation and routing counts, where the engine reported any."""
    found: dict[str, Any] = {}
    cache, spec = getattr(sample, "prefix_cache_info", None), getattr(sample, "spec_info", None)
    if cache is not None and getattr(cache, "total_prompt_tokens", None):
        found["cache"] = {"cached_tokens": int(cache.cached_tokens)}
    if spec is not None and getattr(spec, "spec_draft_token_num", None):
        found["spec"] = {"drafted": int(spec.spec_draft_token_num), "accepted": int(spec.spec_accept_token_num)}
    shape = getattr(getattr(sample, "rollout_routed_experts", None), "shape", None)
    if shape is not None and len(shape) == 3 and len(sample.tokens) > 1:
        rows, layers, top_k = (int(size) for size in shape)
        share = min(rows / (len(sample.tokens) - 1), 1.0)
        found["routed_experts"] = {"coverage": share, "layers": layers, "top_k": top_k}
    return found


def support_of(sample: Any, length: int) -> dict[str, Any]:
    """The token ids kept by top-p at each position, where the engine returned them for replay."""
    ids = plain(getattr(sample, "rollout_top_p_token_ids", None))
    offsets = plain(getattr(sample, "rollout_top_p_token_offsets", None))
    if ids is None or offsets is None or len(offsets) != length + 1:
        return {}
    return {"support": ids, "support_offsets": offsets}


def plain(value: Any) -> list[Any] | None:
    """A list of numbers from a list, array or tensor; None for None and for what is held elsewhere."""
    if value is None or isinstance(value, list):
        return value
    if isinstance(value, tuple):
        return list(value)
    held = value.tolist() if hasattr(value, "tolist") else None
    return held if isinstance(held, list) else None


def text(value: Any) -> str | None:
    """A non-empty string of a value, or None."""
    return None if value is None or value == "" else str(value)
