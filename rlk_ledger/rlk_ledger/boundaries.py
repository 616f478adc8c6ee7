"""From `boundary.captured` events to logical tensors: shards of one pass joined, replicas compared, rows named.

Rows of a logical tensor are tokens, columns its last axis (or, of a tensor cut into heads, every axis after the
tokens). Which token a row holds comes from the pass's `batch.layout`; without one rows compare by place.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from rlk_ledger.history import Fact, History, as_numpy

Float32 = npt.NDArray[np.float32]


class Place(NamedTuple):
    """A pass of one side: the role that ran it, its name and the data-parallel rank it belongs to."""

    role: str
    pass_id: str
    dp: int


@dataclass(slots=True, eq=False)
class Piece:
    """One rank's part: rows and columns (half-open ranges, None for all) of the values it held."""

    fact: Fact
    rows: tuple[tuple[int, int], ...] | None
    columns: tuple[int, int] | None
    tp: tuple[int, int] | None

    @property
    def values(self) -> Float32 | None:
        """What was recorded, [rows, columns]; None when only the digest was."""
        array = self.fact.arrays.get("values")
        shape = self.fact.fields.get("shape")
        return None if array is None or not shape else as_numpy(array).reshape(-1, shape[-1])


@dataclass(slots=True, eq=False)
class Tensor:
    """A logical tensor at one boundary of one pass; `problem` says why its values cannot be used.

    parts: the columns of each rank in rank order (one for an unsharded tensor), float32 [rows, columns].
    """

    boundary: str
    stage: str
    order: int
    layer: int | None
    dtype: str | None
    lead: tuple[int, ...]
    digest: str | None
    parts: list[Float32] = field(default_factory=list)
    problem: str | None = None

    @property
    def values(self) -> Float32 | None:
        """The whole tensor, None without values."""
        return np.concatenate(self.parts, axis=1) if self.parts else None


class Differing(NamedTuple):
    """Ranks that must hold the same bits at a boundary and do not."""

    place: Place
    boundary: str
    stage: str
    writers: tuple[str, str]


@dataclass(slots=True)
class Pass:
    """Everything captured in one forward pass of one side: its tensors and where each sample's tokens lie.

    rows: sample id -> (first row, count) in the order of its positions; None where no layout was recorded.
    """

    place: Place
    step: int | None
    engine: str | None
    layout_id: str | None
    tensors: list[Tensor]
    rows: dict[str, tuple[int, int]] | None
    replicas: list[Differing]


def read_passes(history: History) -> list[Pass]:
    """The captured passes of a run, in the order in which they were recorded."""
    layouts = {f.fields["layout_id"]: f for f in history.of("batch.layout")}
    grouped: dict[Place, list[Fact]] = {}
    for fact in history.of("boundary.captured"):
        role = history.role(fact.writer_id) or "unknown"
        dp = (_parallel(history, fact.writer_id, "dp") or (0, 1))[0]
        grouped.setdefault(Place(role, fact.fields.get("pass_id") or "forward", dp), []).append(fact)
    return [_pass(history, place, facts, layouts) for place, facts in grouped.items()]


def _parallel(history: History, writer_id: str, axis: str) -> tuple[int, int] | None:
    place = (history.writers.get(writer_id, {}).get("parallel") or {}).get(axis)
    return None if place is None else (place["rank"], place["size"])


def _pass(history: History, place: Place, facts: list[Fact], layouts: Mapping[str, Fact]) -> Pass:
    by_boundary: dict[tuple[str, str], list[Fact]] = {}
    for fact in facts:
        key = fact.fields["boundary"], fact.fields.get("stage") or "output"
        by_boundary.setdefault(key, []).append(fact)
    replicas: list[Differing] = []
    tensors = [_tensor(history, place, key, held, replicas) for key, held in by_boundary.items()]
    first = facts[0]
    layout_id = first.fields.get("layout_id")
    engine = (history.writers.get(first.writer_id, {}).get("engine") or {}).get("name")
    lead = next((t.lead for t in tensors if t.lead), ())
    layout = None if layout_id is None else layouts.get(layout_id)
    rows = None if layout is None else _rows(layout, lead)
    ordered = sorted(tensors, key=lambda t: t.order)
    return Pass(place, first.fields.get("step"), engine, layout_id, ordered, rows, replicas)


def _rows(layout: Fact, lead: tuple[int, ...]) -> dict[str, tuple[int, int]] | None:
    """Where each sample's tokens lie among the flattened rows: packed end to end, or padded on one side."""
    names, lengths = layout.fields.get("sample_order"), layout.arrays.get("sequence_lengths")
    if not names or lengths is None or len(lengths) != len(names):
        return None
    sizes = as_numpy(lengths).astype(int).tolist()
    if layout.fields.get("packing"):
        starts = np.cumsum([0, *sizes]).tolist()
    elif len(lead) == 2 and lead[0] == len(names):
        left = layout.fields.get("padding_side") == "left"
        starts = [i * lead[1] + (lead[1] - size if left else 0) for i, size in enumerate(sizes)]
    else:
        return None
    return {name: (start, size) for name, start, size in zip(names, starts, sizes)}


def _tensor(
    history: History, place: Place, key: tuple[str, str], facts: list[Fact], replicas: list[Differing]
) -> Tensor:
    boundary, stage = key
    pieces = [_piece(history, fact) for fact in facts]
    fields = facts[0].fields
    shape = tuple(fields.get("shape") or ())
    tensor = Tensor(
        boundary=boundary,
        stage=stage,
        order=min(f.fields["order"] for f in facts),
        layer=fields.get("layer"),
        dtype=fields.get("dtype"),
        lead=shape[:-1],
        digest=fields["digest"] if all(p.rows is None and p.columns is None for p in pieces) else None,
    )
    if len({f.writer_id for f in facts}) < len(facts):
        tensor.problem = "captured more than once in one pass"
    elif len({f.fields.get("dtype") for f in facts}) > 1:
        tensor.problem = "its ranks hold different dtypes"
    else:
        distinct = _distinct(place, boundary, stage, pieces, replicas)
        tensor.problem = _incomplete(pieces, distinct)
        if tensor.problem is None:
            _join(tensor, distinct)
    return tensor


def _piece(history: History, fact: Fact) -> Piece:
    shard, columns = fact.fields.get("shard"), fact.fields.get("feature_range")
    rows = None
    if shard is not None and shard["axis"] == "sequence":
        rows = tuple((a, b) for a, b in shard["ranges"])
    elif shard is not None and len(shard["ranges"]) == 1:
        columns = shard["ranges"][0]
    tp = _parallel(history, fact.writer_id, "tp")
    return Piece(fact, rows, None if columns is None else (columns[0], columns[1]), tp)


def _distinct(
    place: Place, boundary: str, stage: str, pieces: Iterable[Piece], replicas: list[Differing]
) -> list[Piece]:
    """One piece for every part of the tensor; ranks that hold the same part must hold the same bits."""
    held: dict[Any, Piece] = {}
    for piece in pieces:
        twin = held.setdefault((piece.rows, piece.columns), piece)
        if twin is not piece and twin.fact.fields["digest"] != piece.fact.fields["digest"]:
            writers = (twin.fact.writer_id, piece.fact.writer_id)
            replicas.append(Differing(place, boundary, stage, writers))
    return list(held.values())


def _incomplete(pieces: list[Piece], distinct: list[Piece]) -> str | None:
    """Why the parts are not the whole tensor, None when they are: every rank spoke, and ranges are a partition."""
    shards = [p.fact.fields["shard"] for p in pieces if p.fact.fields.get("shard") is not None]
    sizes = {s["world_size"] for s in shards} or {p.tp[1] for p in distinct if p.columns is not None and p.tp}
    ranks = {s["rank"] for s in shards} or {p.tp[0] for p in pieces if p.columns is not None and p.tp}
    cut = any(p.columns is not None or p.rows is not None for p in distinct)
    if cut and len(sizes) != 1:
        return "a shard whose world size is not recorded" if not sizes else "shards of several world sizes"
    if cut and ranks != set(range(next(iter(sizes)))):
        return f"shards of ranks {sorted(set(range(next(iter(sizes)))) - ranks)} are missing"
    if any((p.columns is None) != (distinct[0].columns is None) for p in distinct):
        return "some ranks hold all columns and some a part"
    columns = sorted({p.columns for p in distinct if p.columns is not None})
    if columns and not _partition(columns):
        return "the column ranges of its shards are no partition"
    for part in {p.columns for p in distinct}:
        spans = sorted(s for p in distinct if p.columns == part for s in p.rows or ())
        if spans and not _partition(spans):
            return "the row ranges of its shards are no partition"
    return None


def _partition(spans: list[tuple[int, int]]) -> bool:
    edges = [0, *(end for _, end in spans)]
    return all(start == edge and end > start for (start, end), edge in zip(spans, edges))


def _join(tensor: Tensor, pieces: list[Piece]) -> None:
    """Fills `parts` by column range, rows put where they belong; leaves it empty where a rank kept no values."""
    held = [(piece, piece.values) for piece in pieces]
    if any(values is None for _, values in held):
        return
    parts: dict[tuple[int, int] | None, list[tuple[Piece, Float32]]] = {}
    for piece, values in held:
        assert values is not None
        parts.setdefault(piece.columns, []).append((piece, values))
    for columns, group in sorted(parts.items(), key=lambda item: item[0] or (0, 0)):
        if any(columns is not None and v.shape[1] != columns[1] - columns[0] for _, v in group):
            tensor.problem, tensor.parts = "a shard is not as wide as the range it says", []
            return
        if group[0][0].rows is None:
            tensor.parts.append(group[0][1])
            continue
        whole = np.full((max(end for p, _ in group for _, end in p.rows or ()), group[0][1].shape[1]), np.nan, "<f4")
        for piece, values in group:
            at = np.concatenate([np.arange(start, end) for start, end in piece.rows or ()])
            if len(at) != len(values):
                tensor.problem, tensor.parts = "a shard has not as many rows as the ranges it says", []
                return
            whole[at] = values
        tensor.parts.append(whole)
        tensor.lead = (len(whole),)
