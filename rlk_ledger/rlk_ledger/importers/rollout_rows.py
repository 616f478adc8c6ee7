"""One sample of a rollout dump of slime, vime or miles."""

from typing import Any

import numpy as np

from rlk_ledger.classes import FINITE, MISSING
from rlk_ledger.importers.model import ABSENT, DERIVED, MEASURED, Imported, Mask, Scored, Source, Values
from rlk_ledger.importers.numpy_pickles import LateArray
from rlk_ledger.importers.rows import Row
from rlk_ledger.importers.torch_files import Tensor
from rlk_ledger_schemas.fingerprints import sha256

_STATUSES = ("completed", "truncated", "aborted", "failed")
_NEVER = ("sampling", "engine", "tokenizer", "finish_reason", "model")
"""Fields of `rollout.sample` no such dump has."""


def read_sample(row: Row, step: int, number: int, origin: Source) -> Imported:
    """The sample of one row, with the rollout's and a teacher's values; raises FormatError."""
    ids, length = row.ids("tokens"), row.count("response_length")
    if length > len(ids):
        raise row.fail(f"`response_length` is {length} and there are {len(ids)} `tokens`.")
    cut = len(ids) - length
    mask, how = _mask(row, length)
    index = row.maybe_count("index")
    sample = Imported(
        sample_id=f"{step}-{index}" if index is not None else f"{step}-p{number}",
        step=step,
        prompt=ids[:cut],
        response=ids[cut:],
        mask=mask,
        origin=origin,
        index=index,
        rollout_id=step,
        metadata={"loss_mask": how, **dict.fromkeys(_NEVER, ABSENT)},
    )
    _describe(sample, row)
    version = _version(sample, row)
    if "rollout_log_probs" in row:
        values = row.values("rollout_log_probs", length)
        classes = missing_where(row.nulls("rollout_log_probs", length) | tool_zeros(values, mask))
        score = Scored("rollout", values, origin, classes, mask=mask, metadata={"dtype": ABSENT})
        score.fields["weight_version"] = version
        score.metadata["weight_version"] = DERIVED if version is not None else ABSENT
        sample.scores.append(score)
    if "teacher_log_probs" in row:
        teacher = row.values("teacher_log_probs", length)
        classes = missing_where(row.nulls("teacher_log_probs", length))
        unknown = {"weight_version": ABSENT, "dtype": ABSENT}
        sample.scores.append(Scored("teacher", teacher, origin, classes, metadata=unknown))
    return sample


def tool_zeros(values: Values, mask: Mask) -> Any:
    """Where a masked token holds an exact 0.0: the engine never scored it (bool, one a token)."""
    return (mask == 0) & (values.view(np.uint32) == 0)


def missing_where(where: Any) -> Mask | None:
    """Value classes (uint8) that say `missing` where `where` is true; None when nothing is missing."""
    return np.where(where, MISSING, FINITE).astype(np.uint8) if where.any() else None


def _mask(row: Row, length: int) -> tuple[Mask, str]:
    """The loss mask and how it is known: a sample without one trains on every token, a removed one on none."""
    if row.get("remove_sample") is True:
        return np.zeros(length, np.uint8), DERIVED
    if "loss_mask" in row:
        return row.mask("loss_mask", length), MEASURED
    return np.ones(length, np.uint8), DERIVED


def _describe(sample: Imported, row: Row) -> None:
    """Fields a row may have: group, session, status, reward, caches, speculation, support, routes."""
    group = row.maybe_count("group_index")
    status = row.get("status")
    known: dict[str, Any] = {
        "group_id": None if group is None else str(group),
        "session_id": row.maybe_text("session_id"),
        "status": status if type(status) is str and status in _STATUSES else None,
        "reward": row.maybe_number("reward"),
        "cache": _cache(row),
        "spec": _spec(row),
        "routed_experts": _routes(row, len(sample.prompt) + len(sample.response)),
        **_support(row, len(sample.response)),
    }
    for name, value in known.items():
        sample.metadata[name] = ABSENT if value is None else MEASURED
        if value is not None:
            sample.fields[name] = value


def _version(sample: Imported, row: Row) -> str | None:
    """The one weight version every generation call reports; a file has one entry a call, not one a token."""
    versions = row.get("weight_versions")
    known = type(versions) is list and all(type(version) in (str, int) for version in versions)
    held = [str(version) for version in versions] if known else []
    length = len(sample.response)
    if len(set(held)) != 1 or not 0 < len(held[0]) <= 512:
        sample.metadata["weight_spans"] = ABSENT
        return None
    sample.fields["weight_spans"] = [{"version": held[0], "start": 0, "end": length}]
    sample.metadata["weight_spans"] = DERIVED
    return held[0]


def _cache(row: Row) -> dict[str, Any] | None:
    """Cached tokens, where a call was counted at all: the field starts at zero."""
    info = Row(row.get("prefix_cache_info") or {}, f"{row.where}.prefix_cache_info")
    if not info.maybe_count("total_prompt_tokens"):
        return None
    return {"cached_tokens": info.maybe_count("cached_tokens") or 0}


def _spec(row: Row) -> dict[str, Any] | None:
    """Drafted and accepted tokens, where the verifier ran at all: the field starts at zero."""
    info = Row(row.get("spec_info") or {}, f"{row.where}.spec_info")
    if not info.maybe_count("spec_verify_ct"):
        return None
    return {
        "drafted": info.maybe_count("spec_draft_token_num") or 0,
        "accepted": info.maybe_count("spec_accept_token_num") or 0,
    }


def _support(row: Row, length: int) -> dict[str, Any]:
    """Token ids top-p kept at each response position, where the engine returned them."""
    if "rollout_top_p_token_ids" not in row or "rollout_top_p_token_offsets" not in row:
        return {"support": None}
    ids, offsets = row.ids("rollout_top_p_token_ids"), row.ids("rollout_top_p_token_offsets")
    rising = len(offsets) == length + 1 and offsets[0] == 0 and offsets[-1] == len(ids)
    if not rising or (np.diff(offsets) < 0).any():
        raise row.fail("`rollout_top_p_token_offsets` do not cut `rollout_top_p_token_ids` into one part a token.")
    return {"support": ids, "support_offsets": offsets}


def _routes(row: Row, tokens: int) -> dict[str, Any] | None:
    """Experts that served each token, where they are arrays of token x layer x choice, one or one a generation call."""
    value = row.get("rollout_routed_experts")
    chunks = value if type(value) is list else [value]
    if not chunks or not all(isinstance(chunk, Tensor | LateArray) for chunk in chunks):
        return None
    arrays = [chunk.numpy() if isinstance(chunk, Tensor) else chunk.array for chunk in chunks]
    if any(a.ndim != 3 or a.dtype.kind not in "iu" or not a.size or a.shape[1:] != arrays[0].shape[1:] for a in arrays):
        return None
    array = np.concatenate(arrays)
    flat = array.astype(np.int32)
    return {
        "digest": sha256(flat.tobytes()),
        "coverage": min(1.0, len(array) / max(1, tokens - 1)),
        "layers": int(array.shape[1]),
        "top_k": int(array.shape[2]),
        "array": flat.reshape(-1),
    }
