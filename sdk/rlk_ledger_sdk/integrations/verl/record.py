"""The batch's samples and log-probabilities as events.

Fields of verl 0.9: responses, prompts, response_mask, attention_mask, rollout_log_probs, old_log_probs, entropy or
entropys, ref_log_prob, rm_scores or token_level_scores, uid, min_global_steps and max_global_steps (the weights a
response began and ended with).
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from rlk_ledger_schemas.errors import EventError
from rlk_ledger_schemas.fingerprints import mask_digest, token_digest
from rlk_ledger_schemas.metrics import VALUE_CLASSES
from rlk_ledger_sdk.api import current, record
from rlk_ledger_sdk.declared import declare
from rlk_ledger_sdk.integrations.verl.columns import Batch, Row, option

_MISSING = VALUE_CLASSES.index("missing")
_ROLLOUT = "actor_rollout_ref.rollout"
_LOGPROB = {"alignment": "token_i_given_before_i"}


class Names:
    """Sample ids of a batch: the queue's keys, else the prompt's uid and a number among its samples.

    The number is that of the recorded rollout with the same tokens, because the trainer reorders batches to balance
    them; a sample whose tokens nobody recorded takes the next number left.
    """

    def __init__(self) -> None:
        self._left: dict[str, list[tuple[str, str]]] = {}

    def give(self, batch: Batch, keys: Sequence[str] | None) -> list[str]:
        """Ids for a recorded rollout."""
        if keys is not None:
            return [str(key) for key in keys]
        taken: Counter[str] = Counter()
        ids = []
        self._left = {}
        for row, uid in zip(batch.rows, _uids(batch)):
            name = f"{uid}_{taken[uid]}"
            taken[uid] += 1
            ids.append(name)
            self._left.setdefault(uid, []).append((name, _digest(row)))
        return ids

    def find(self, batch: Batch, keys: Sequence[str] | None) -> list[str]:
        """The ids of the same samples in a later batch."""
        if keys is not None:
            return [str(key) for key in keys]
        left = {uid: list(held) for uid, held in self._left.items()}
        uids, ids = _uids(batch), [""] * len(batch.rows)
        for at, (row, uid) in enumerate(zip(batch.rows, uids)):
            same = next((held for held in left.get(uid, ()) if held[1] == _digest(row)), None)
            if same is not None:
                left[uid].remove(same)
                ids[at] = same[0]
        extra: Counter[str] = Counter()
        for at, uid in enumerate(uids):
            if not ids[at]:
                held = left.get(uid)
                ids[at] = held.pop(0)[0] if held else f"{uid}_{len(self._left.get(uid, ())) + extra[uid]}"
                extra[uid] += not held
        return ids


def record_samples(batch: Batch, ids: Sequence[str], config: Any, skip: Sequence[bool], tags: Sequence[Any]) -> None:
    """`rollout.sample` and the engine's `logprobs` of every sample not skipped."""
    values = batch.scores("rollout_log_probs")
    contract = declare("logprob", rollout_contract(config, batch)) if values is not None else ""
    rewards, uids = rewards_of(batch), _uids(batch)
    for at, row in enumerate(batch.rows):
        if skip[at]:
            continue
        version = version_of(batch, at, tags)
        source = {"engine": "absent", "finish_reason": "absent", "status": "absent", "sampling": "derived"}
        source["weight_spans"] = "absent" if version is None else "measured"
        fields: dict[str, Any] = {
            "sample_id": ids[at],
            "group_id": uids[at] if batch.column("uid") is not None else None,
            "prompt_token_ids": row.prompt,
            "response_token_ids": row.response,
            "loss_mask": row.mask,
            "reward": rewards[at],
            "sampling": sampling_of(config, batch),
            "model": option(config, "actor_rollout_ref.model.path"),
            "metadata_source": source,
        }
        if version is not None:
            fields["weight_spans"] = [{"version": version, "start": 0, "end": row.length}]
            fields["stamp_rule"] = "global step whose weights the engine held from first to last token"
        if rewards[at] is None:
            source["reward"] = "absent"
        record("rollout.sample", **{name: value for name, value in fields.items() if value is not None})
        if values is not None and row.length:
            score = {"sample_id": ids[at], "values": values[at], **missing_codes(values[at], row.mask)}
            if version is not None:
                score["weight_version"] = version
            record("logprobs", source="rollout", contract_id=contract, **score)


def record_scores(
    batch: Batch,
    ids: Sequence[str],
    field: str,
    source: str,
    contract: Mapping[str, Any],
    version: str | None,
    skip: Sequence[bool],
    rows: Sequence[Row] | None = None,
) -> None:
    """One training-side column as `logprobs`, with digests of the tokens and mask it was computed on.

    `rows`: the samples' tokens, where `batch` holds scores only. Raises EventError where the column is missing.
    """
    values = batch.scores(field)
    if values is None:
        raise EventError(f"verl: the batch has no {field}; record it after the trainer computed it.")
    entropies = batch.scores("entropy") or batch.scores("entropys") if source == "training" else None
    contract_id = declare("logprob", contract)
    how = {"weight_version": "absent" if version is None else "derived"}
    for at, row in enumerate(rows or batch.rows):
        if skip[at] or not row.length:
            continue
        fields: dict[str, Any] = {"sample_id": ids[at], "source": source, "values": values[at], "pass_id": field}
        fields["token_digest"] = token_digest(row.response)
        if (digest := _mask_digest(row.mask)) is not None:
            fields["mask_digest"] = digest
        if entropies is not None:
            fields["entropy"] = entropies[at]
        if version is not None:
            fields["weight_version"] = version
        record("logprobs", contract_id=contract_id, metadata_source=how, **fields)


def rollout_contract(config: Any, batch: Batch) -> dict[str, Any]:
    """What the engine's log-probabilities include: vLLM's by rollout.logprobs_mode, SGLang's by the temperature."""
    mode = option(config, f"{_ROLLOUT}.logprobs_mode")
    body: dict[str, Any] = {**_LOGPROB, "execution_path": "decode", "temperature": temperature_of(config, batch)}
    if option(config, f"{_ROLLOUT}.name") == "sglang":
        return {**body, "mode": "processed"}
    body["mode"] = {"processed_logprobs": "processed", "raw_logprobs": "raw"}.get(str(mode))
    if body["mode"] == "processed":
        body |= {name: option(config, f"{_ROLLOUT}.{name}") for name in ("top_p", "top_k")}
    return body


def training_contract(config: Any, batch: Batch) -> dict[str, Any]:
    """What the trainer's log-probabilities are: of logits divided by the temperature, over the whole vocabulary."""
    actor = "actor_rollout_ref.actor"
    strategy = {"fsdp2": "fsdp"}.get(str(option(config, f"{actor}.strategy")), option(config, f"{actor}.strategy"))
    dtypes = [option(config, f"{actor}.{part}.dtype") for part in (f"{strategy}_config", f"{strategy}", "engine")]
    body: dict[str, Any] = {**_LOGPROB, "mode": "processed", "execution_path": "full_prefill"}
    body["temperature"] = temperature_of(config, batch)
    body["compute_dtype"] = next((str(dtype) for dtype in dtypes if dtype is not None), None)
    return body


def temperature_of(config: Any, batch: Batch) -> float | None:
    """The batch's own temperature, else the rollout configuration's."""
    value = batch.meta.get("temperature", option(config, f"{_ROLLOUT}.temperature"))
    return None if value is None else float(value)


def sampling_of(config: Any, batch: Batch) -> dict[str, Any]:
    """Sampling parameters of the rollout configuration."""
    found = {name: option(config, f"{_ROLLOUT}.{name}") for name in ("top_p", "top_k", "n")}
    return {k: v for k, v in {"temperature": temperature_of(config, batch), **found}.items() if v is not None}


def version_of(batch: Batch, at: int, tags: Sequence[Any]) -> str | None:
    """The global step whose weights sampled a whole response; None where it is unknown or changed on the way."""
    bounds = []
    for name in ("min_global_steps", "max_global_steps"):
        tag = tags[at].get(name) if tags and isinstance(tags[at], Mapping) else None
        bounds.append(batch.plain(name)[at] if tag is None else tag)
    return str(int(bounds[0])) if bounds[0] is not None and bounds[0] == bounds[1] else None


def rewards_of(batch: Batch) -> list[float | None]:
    """Each sample's total score, where the batch holds one."""
    for name in ("rm_scores", "token_level_scores"):
        column = batch.column(name)
        if column is not None and len(column) == len(batch.rows):
            return [float(row.sum()) if hasattr(row, "sum") else float(sum(row)) for row in column]
    return [None] * len(batch.rows)


def missing_codes(values: Any, mask: Any) -> dict[str, Any]:
    """`value_class` for the exact zeros that agent loops put at masked tool tokens, which no engine scored."""
    active = _plain(mask)
    if all(active):
        return {}
    pairs = zip(values.tolist() if hasattr(values, "tolist") else values, active)
    codes = [_MISSING if not trained and value == 0.0 else 0 for value, trained in pairs]
    return {"value_class": codes} if any(codes) else {}


def refuse(field: str, error: EventError) -> None:
    """One logged sentence and a stated gap for a batch that cannot be read."""
    current().rejected(field, error)


def _uids(batch: Batch) -> list[str]:
    return [str(uid) if uid is not None else str(row.at) for row, uid in zip(batch.rows, batch.plain("uid"))]


def _digest(row: Row) -> str:
    return token_digest(row.response)


def _plain(mask: Any) -> list[Any]:
    return mask.tolist() if hasattr(mask, "tolist") else list(mask)


def _mask_digest(mask: Any) -> str | None:
    try:
        return mask_digest(mask)
    except EventError:  # a mask of weights is no mask of tokens, and has no digest
        return None
