"""From one finished completion of vLLM to the events it makes: prompt.recorded, rollout.sample, logprobs."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from rlk_ledger_schemas.arrays import Array, to_array
from rlk_ledger_schemas.fingerprints import sha256
from rlk_ledger_sdk.api import record
from rlk_ledger_sdk.integrations.vllm.sampling import LogprobContracts, recorded
from rlk_ledger_sdk.integrations.vllm.steps import Prefill
from rlk_ledger_sdk.integrations.vllm.values import classes, numbers, sampled

UNSET_VERSION = "default"
"""vLLM's label for weights nobody named."""
_STATUS = {"stop": "completed", "length": "truncated", "abort": "aborted", "error": "failed"}

Named = Callable[[Any, Any], str]


class Request(NamedTuple):
    """What was known when a request was added."""

    params: Any = None
    version: str | None = None
    """The last weight version the watch had heard of."""
    cache_version: str | None = None
    """The weight version at the last reset of the prefix cache; None when there has been none since the start."""

    @property
    def siblings(self) -> bool:
        """Whether other completions belong to the same request."""
        return self.params is not None and int(self.params.n) > 1


class Identity(NamedTuple):
    """How samples of one watch are named and what they all carry."""

    engine: str
    model: str | None
    block_size: int | None
    sample_id: Named
    group_id: Callable[[Any, Any], str | None]
    loss_mask: Callable[[Any, Any], Sequence[int]] | None


class Finished(NamedTuple):
    """A completion as recorded."""

    output: Any
    completion: Any
    request: Request
    version_now: str | None
    name: str
    """The completion's name after its request: the sample id unless the user has another rule."""
    prefill: Prefill | None = None
    """As the hook in the engine measured it; None where there is none."""


def record_completion(
    finished: Finished, who: Identity, contracts: LogprobContracts | None, prompt: Mapping[str, Any]
) -> str:
    """Records one sample and its log-probabilities; returns its sample id. `prompt` is the sample's prompt field."""
    output, completion, request = finished.output, finished.completion, finished.request
    tokens = completion.token_ids if type(completion.token_ids) is list else list(completion.token_ids)
    sample_id = who.sample_id(output, completion)
    ids = to_array(tokens, "int32", "response_token_ids")  # once, for the digest and for the event
    digest = sha256(ids.data)
    source: dict[str, str] = {}
    spans, rule = _spans(finished, len(tokens), source)
    record(
        "rollout.sample",
        sample_id=sample_id,
        group_id=who.group_id(output, completion),
        response_token_ids=ids,
        loss_mask=Array("uint8", b"\1" * len(tokens)) if who.loss_mask is None else who.loss_mask(output, completion),
        token_digest=digest,
        sampling=recorded(request.params, completion.index) if request.params is not None else None,
        finish_reason=completion.finish_reason,
        status=_STATUS.get(completion.finish_reason),
        weight_spans=spans,
        stamp_rule=rule,
        engine=who.engine,
        model=who.model,
        cache=_cache(finished, who, source),
        chunks=_chunks(finished.prefill, source),
        metadata_source=source or None,
        labels=_labels(finished, sample_id),
        **prompt,
        **_extras(completion, len(tokens), len(output.prompt_token_ids or ()), source),
    )
    if completion.logprobs is not None and contracts is not None and contracts.scores:
        _record_values(sample_id, completion.logprobs, tokens, digest, spans, contracts.of(request.params))
    return sample_id


def _labels(finished: Finished, sample_id: str) -> dict[str, str] | None:
    """The request's own name where the user has another rule, and the LoRA adapter it ran with."""
    labels = {} if sample_id == finished.name else {"request": finished.name}
    adapter = getattr(finished.output, "lora_request", None)
    if adapter is not None:
        labels["adapter"] = str(adapter.lora_name)
    return labels or None


def _record_values(sample_id: str, logprobs: Any, tokens: list[int], digest: str, spans: Any, contract_id: str) -> None:
    values = sampled(logprobs, tokens)
    kinds = classes(values)
    record(
        "logprobs",
        sample_id=sample_id,
        source="rollout",
        values=values if kinds is None else numbers(values),
        value_class=kinds,
        dtype="float32",
        contract_id=contract_id,
        weight_version=spans[0]["version"] if spans and len(spans) == 1 else None,
        token_digest=digest,
    )


def _spans(finished: Finished, length: int, source: dict[str, str]) -> tuple[list[dict[str, Any]] | None, str | None]:
    """The weight spans of a response: measured by the engine, else derived from what the watch knew, else absent."""
    measured = getattr(finished.completion, "weight_versions", None)
    if measured and any(span.version != UNSET_VERSION for span in measured):
        source["weight_spans"] = "measured"
        spans = [{"version": s.version, "start": s.start, "end": s.end} for s in measured]
        return spans, "vllm.weight_versions"
    version = finished.request.version
    if version is None or version != finished.version_now:
        source["weight_spans"] = "absent"
        return None, None
    source["weight_spans"] = "derived"
    return [{"version": version, "start": 0, "end": length}], "last_version_loaded_before_the_request"


def _cache(finished: Finished, who: Identity, source: dict[str, str]) -> dict[str, Any] | None:
    """The prefix cache as this completion met it.

    An output of several completions carries the count of the one that finished last; it says nothing of the others.
    """
    request = finished.request
    if finished.prefill is not None:
        cached = finished.prefill.cached
    elif finished.output.num_cached_tokens is not None and len(finished.output.outputs) == 1 and not request.siblings:
        cached = finished.output.num_cached_tokens
    else:
        source["cache"] = "absent"
        return None
    source["cache"] = "measured"
    out: dict[str, Any] = {"cached_tokens": int(cached)}
    if who.block_size is not None:
        out["block_size"] = who.block_size
    if cached and request.cache_version is not None:
        out["writer_version"] = request.cache_version
        source["cache.writer_version"] = "derived"
    return out


def _chunks(prefill: Prefill | None, source: dict[str, str]) -> list[int] | None:
    ends = None if prefill is None else prefill.ends
    source["chunks"] = "absent" if ends is None else "measured"
    return ends


def _extras(completion: Any, length: int, prompt: int, source: dict[str, str]) -> dict[str, Any]:
    """What only some engines and versions expose: speculative counts, routed experts, the kept support."""
    out: dict[str, Any] = {}
    spec = getattr(completion, "spec_decode_metrics", None)
    if spec is not None:
        accepted = sum(j * times for j, times in enumerate(spec.histogram))
        out["spec"] = {"drafted": int(spec.num_draft_tokens), "accepted": int(accepted)}
    experts = getattr(completion, "routed_experts", None)
    if experts is not None:
        rows, layers, top_k = (int(size) for size in experts.shape)
        array = to_array(experts.reshape(-1), "int32", "routed_experts.array")
        forwarded = max(1, prompt + length - 1)  # the last token is sampled, not forwarded
        out["routed_experts"] = {
            "digest": sha256(array.data),
            "coverage": min(1.0, rows / forwarded),
            "layers": layers,
            "top_k": top_k,
            "array": array,
        }
        source["routed_experts"] = "measured"
    mask = getattr(completion, "sampling_mask", None)
    if mask is not None and len(mask.token_ids) == length:
        offsets = [0]
        for kept in mask.token_ids:
            offsets.append(offsets[-1] + len(kept))
        out["support"] = [token for kept in mask.token_ids for token in kept]
        out["support_offsets"] = offsets
        source["support"] = "measured"
    return out
