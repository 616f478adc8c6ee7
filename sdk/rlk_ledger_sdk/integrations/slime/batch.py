"""A trainer rank's batch as rows: which sample, which tokens, which positions of it are this rank's."""

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from rlk_ledger_schemas.errors import EventError
from rlk_ledger_schemas.fingerprints import mask_digest, token_digest
from rlk_ledger_sdk.api import record
from rlk_ledger_sdk.integrations.slime.host import on_host
from rlk_ledger_sdk.integrations.slime.parallel import Rank, owned_ranges


class Row(msgspec.Struct, frozen=True):
    """One sample of the batch; `ranges` are the response positions whose values this rank holds."""

    sample_id: str
    total: int
    response: int
    ranges: list[tuple[int, int]]
    token_digest: str
    mask_digest: str | None
    active: bool

    @property
    def held(self) -> int:
        """How many values this rank holds of the sample."""
        return sum(b - a for a, b in self.ranges)


class Rows:
    """The rows of the current batch, found again by the identity of their rollout log-probabilities.

    Identity holds because micro-batches are lists of the batch's own objects; a weak reference guards against an
    address used again, where the objects can be referred to weakly.
    """

    def __init__(self, data: Mapping[str, Any], rows: Sequence[Row] = ()) -> None:
        self.data = {"rollout_top_p_token_ids": data.get("rollout_top_p_token_ids")}
        self.all = list(rows)
        self.one_update = len(data.get("num_microbatches") or ()) == 1
        self.version: str | None = None
        self.rollout_id: int | None = None
        behaviour = data.get("rollout_log_probs") or ()
        self._by_id = {id(values): (_weak(values), row) for values, row in zip(behaviour, self.all)}
        self._kept: dict[int, Any] = {}

    def named(self, version: str | None, rollout_id: int | None) -> "Rows":
        """Itself, under a weight version and a rollout id."""
        self.version, self.rollout_id = version, rollout_id
        return self

    def of(self, behaviour: Any) -> Row | None:
        """The row whose rollout log-probabilities this object is."""
        alive, row = self._by_id.get(id(behaviour), (None, None))
        return row if row is not None and (alive is None or alive() is behaviour) else None

    def keep(self, values: Sequence[Any]) -> None:
        """Notes the objects whose values are recorded."""
        self._kept = {id(one): _weak(one) for one in values}

    def kept(self, values: Any) -> bool:
        """Whether this very object was recorded."""
        if id(values) not in self._kept:
            return False
        alive = self._kept[id(values)]
        return alive is None or alive() is values


def rows_of(name: str, data: Mapping[str, Any], rank: Rank) -> Rows:
    """The rows of a batch; raises EventError where its columns have different lengths."""
    columns = {key: data.get(key) for key in ("sample_indices", "tokens", "response_lengths", "loss_masks")}
    missing = [key for key, column in columns.items() if column is None]
    if missing:
        raise EventError(
            f"{name}: the training batch has no {missing[0]}, so its log-probabilities belong to no sample."
        )
    sizes = {key: len(column) for key, column in columns.items() if column is not None}
    if len(set(sizes.values())) > 1:
        raise EventError(f"{name}: the columns of the training batch differ in length: {sizes}.")
    padded = data.get("max_seq_lens")
    lengths = [int(n) for n in columns["response_lengths"] or ()]
    tokens, masks = on_host(list(columns["tokens"] or ())), on_host(list(columns["loss_masks"] or ()))
    rows = []
    for i, (index, response) in enumerate(zip(columns["sample_indices"] or (), lengths)):
        total = len(tokens[i])
        ranges = owned_ranges(total, response, rank, None if padded is None else int(padded[i]))
        digest = token_digest(tokens[i][total - response :])
        rows.append(Row(_name(name, index), total, response, ranges, digest, _mask_digest(masks[i]), _active(masks[i])))
    return Rows(data, rows)


def record_layout(
    name: str, args: Any, rows: Rows, data: Mapping[str, Any], rollout_id: int | None, rank: Rank
) -> None:
    """How this rank's batch is laid out, and the samples whose mask leaves nothing to train on."""
    silent = [row.sample_id for row in rows.all if not row.active]
    why = "its loss mask is 0 at every token"
    packed = getattr(args, "qkv_format", "thd") == "thd"
    record(
        "batch.layout",
        layout_id=layout_id(rollout_id, rank),
        sample_order=[row.sample_id for row in rows.all],
        sequence_lengths=[row.total for row in rows.all],
        packing=packed,
        padding_side="none" if packed else "right",
        global_batch=getattr(args, "global_batch_size", None),
        decisions=[{"kept": False, "reason": why, "sample_id": one} for one in silent] or None,
    )


def layout_id(rollout_id: int | None, rank: Rank) -> str:
    """The name of one rank's batch of one rollout."""
    return f"train-{rollout_id}-dp{rank.dp}-cp{rank.cp}"


def _name(name: str, index: Any) -> str:
    if index is None:
        raise EventError(
            f"{name}: the training batch holds a sample without an index, which no rollout can be found for."
        )
    return str(index.item() if hasattr(index, "item") else index)


def _active(mask: Any) -> bool:
    return bool((mask != 0).any()) if hasattr(mask, "any") else any(mask)


def _mask_digest(mask: Any) -> str | None:
    try:
        return mask_digest(mask)
    except EventError:  # a mask of weights is no mask of tokens, and has no digest
        return None


def _weak(value: Any) -> Any:
    try:
        return weakref.ref(value)
    except TypeError:
        return None
