"""One row of a train dump of slime, vime or miles, and the data-parallel layout it was trained in."""

from typing import Any

from rlk_ledger.importers.joining import TrainRow
from rlk_ledger.importers.model import ABSENT, MEASURED, Scored, Source, Values
from rlk_ledger.importers.rollout_rows import missing_where
from rlk_ledger.importers.rows import Row
from rlk_ledger.importers.torch_files import Tensor

_SOURCES = {"log_probs": "training", "ref_log_probs": "reference", "teacher_log_probs": "teacher"}
_COLUMNS = {
    "tokens": "tokens",
    "response_lengths": "response_lengths",
    "loss_masks": "loss_masks",
    "rollout_log_probs": "rollout_log_probs",
    "entropy": "entropy",
    "sample_indices": "sample_index",
    "partition": "rollout_position",
    **{name: name for name in _SOURCES},
}
"""Columns of `rollout_data` and what one entry of each is called in a row."""


def columns(data: Row) -> list[dict[str, Any]]:
    """The rows of a dump in columns; a column of another length is not one a sample and is left alone."""
    tokens = data.rows("tokens")
    held = {name: data.get(name) for name in _COLUMNS}
    used = {name: list(column) for name, column in held.items() if type(column) in (list, tuple)}
    kept = {name: column for name, column in used.items() if len(column) == len(tokens)}
    return [{_COLUMNS[name]: column[i] for name, column in kept.items()} for i in range(len(tokens))]


def read_row(row: Row, rank: int | None, origin: Source) -> TrainRow:
    """What the trainer holds of one sample; raises FormatError."""
    ids, length = row.ids("tokens"), row.count("response_lengths")
    if length > len(ids):
        raise row.fail(f"`response_lengths` is {length} and there are {len(ids)} `tokens`.")
    total = row.maybe_count("total_lengths")
    if total is not None and total != len(ids):
        raise row.fail(f"`total_lengths` is {total} and there are {len(ids)} `tokens`.")
    cut = len(ids) - length
    out = TrainRow(
        where=f"{origin.name}: {row.where}",
        prompt=ids[:cut],
        response=ids[cut:],
        mask=row.mask("loss_masks", length),
        origin=origin,
        index=row.maybe_count("sample_index"),
        position=row.maybe_count("rollout_position"),
        rank=rank,
        dp=row.maybe_count("data_parallel_rank"),
        rollout=row.values("rollout_log_probs", length) if "rollout_log_probs" in row else None,
    )
    for name, source in _SOURCES.items():
        if name in row:
            out.scores.append(_score(row, name, source, length, out))
    return out


def _score(row: Row, name: str, source: str, length: int, into: TrainRow) -> Scored:
    value = row.get(name)
    if isinstance(value, Tensor) and len(value.shape) == 1 and value.shape[0] < length:
        raise row.fail(
            f"`{name}` has {value.shape[0]} values for {length} response tokens; the parts that context-parallel ranks "
            "hold do not say which tokens they are, so dump with context parallelism off."
        )
    missing = missing_where(row.nulls(name, length))
    score = Scored(source, row.values(name, length), into.origin, missing, ids=into.response, mask=into.mask)
    dtype = value.dtype if isinstance(value, Tensor) else None
    score.fields["dtype"] = dtype
    score.metadata = {"weight_version": ABSENT, "dtype": ABSENT if dtype is None else MEASURED}
    if source == "training" and "entropy" in row:
        score.entropy = _entropy(row, length)
    return score


def _entropy(row: Row, length: int) -> Values | None:
    value = row.get("entropy")
    count = value.shape[0] if isinstance(value, Tensor) and len(value.shape) == 1 else None
    return row.values("entropy", length) if count == length else None


def _numbers(value: Any) -> list[int]:
    """A list of whole numbers; nothing where some are unknown."""
    return list(value) if type(value) in (list, tuple) and all(type(i) is int for i in value) else []


def read_shard(shard: Row, rank: int | None) -> dict[str, Any]:
    """The layout a data-parallel rank trained in: its rank, its samples in order by index and by place, batch sizes."""
    micro = shard.get("micro_batch_indices")
    sizes = {len(one) for one in micro if type(one) is list} if type(micro) is list else set()
    batches = shard.get("global_batch_sizes")
    whole = batches[0] if type(batches) is list and len(batches) == 1 else None
    return {
        "rank": shard.maybe_count("data_parallel_rank") if "data_parallel_rank" in shard else rank,
        "indices": _numbers(shard.get("sample_indices")),
        "positions": _numbers(shard.get("partition")),
        "micro_batch": sizes.pop() if len(sizes) == 1 else None,
        "global_batch": whole if type(whole) is int and whole >= 0 else None,
    }
