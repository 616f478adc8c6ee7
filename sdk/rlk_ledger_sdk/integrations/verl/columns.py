"""One batch of verl, padded or nested, as rows of response tokens.

A legacy DataProto holds padded tensors: `prompts` [batch, prompt] padded left, `responses` [batch, response] padded
right, `attention_mask` over both, and per-sample objects in `non_tensor_batch`. The v1 trainer's TransferQueue gives a
TensorDict of nested tensors, one length a sample, and stacks of objects. Both, and a plain mapping, are read here.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from rlk_ledger_schemas.errors import EventError


class Row(msgspec.Struct, frozen=True):
    """One sample: tensor (or list) slices without padding; what the batch does not hold is None."""

    prompt: Any
    response: Any
    mask: Any
    length: int
    at: int

    @property
    def total(self) -> int:
        """Tokens of prompt and response together."""
        return self.length + (0 if self.prompt is None else len(self.prompt))


class Batch:
    """Columns of a batch by name, each cut to its sample's response tokens."""

    def __init__(self, data: Any) -> None:
        self._tensors = getattr(data, "batch", data)
        objects = getattr(data, "non_tensor_batch", None)
        self._objects: Mapping[str, Any] = objects if isinstance(objects, Mapping) else {}
        meta = getattr(data, "meta_info", None)
        self.meta: Mapping[str, Any] = meta if isinstance(meta, Mapping) else {}
        self.rows = self._rows()

    def column(self, name: str) -> list[Any] | None:
        """The column as one entry a sample, padding included, or None where the batch has none."""
        value = self._objects.get(name)
        if value is None and self._tensors is not None and name in _names(self._tensors):
            value = self._tensors[name]
        return None if value is None else list(_entries(value))

    def scores(self, name: str) -> list[Any] | None:
        """A per-token column, each entry cut to its sample's response; raises EventError where one is too short."""
        column = self.column(name)
        if column is None:
            return None
        if len(column) != len(self.rows):
            raise EventError(f"verl: {name} has {len(column)} rows for {len(self.rows)} samples.")
        for row in self.rows:
            if len(column[row.at]) < row.length:
                have = len(column[row.at])
                raise EventError(f"verl: {name} of sample {row.at} has {have} values for {row.length} response tokens.")
        return [column[row.at][: row.length] for row in self.rows]

    def plain(self, name: str) -> list[Any]:
        """A per-sample column of plain values, None a sample where the batch has none."""
        column = self.column(name)
        if column is None or len(column) != len(self.rows):
            return [None] * len(self.rows)
        return [
            value.item() if hasattr(value, "item") and getattr(value, "ndim", 0) == 0 else value for value in column
        ]

    def _rows(self) -> list[Row]:
        responses, masks = self.column("responses"), self.column("response_mask")
        prompts, attention = self.column("prompts"), self.column("attention_mask")
        if responses is None:
            raise EventError("verl: the batch has no `responses`, so its log-probabilities belong to no tokens.")
        rows = []
        for at, response in enumerate(responses):
            width = len(response)
            seen = attention[at] if attention is not None else None
            length = width if seen is None or len(seen) < width else _count(seen[len(seen) - width :])
            prompt = prompts[at] if prompts is not None else None
            if prompt is not None and seen is not None and len(seen) == len(prompt) + width:
                prompt = prompt[len(prompt) - _count(seen[: len(prompt)]) :]
            mask = masks[at][:length] if masks is not None else [1] * length
            rows.append(Row(prompt, response[:length], mask, length, at))
        return rows


def option(config: Any, path: str, default: Any = None) -> Any:
    """The value at a dotted path of a DictConfig, mapping or object; `default` where any part is missing."""
    for part in path.split("."):
        if config is None:
            return default
        if isinstance(config, Mapping) or hasattr(config, "keys"):
            config = config.get(part)
        else:
            config = getattr(config, part, None)
    return default if config is None else config


def _names(tensors: Any) -> Iterable[str]:
    return tensors.keys() if hasattr(tensors, "keys") else ()


def _entries(value: Any) -> Sequence[Any]:
    """One entry a sample: rows of a padded or nested tensor, objects of a stack, items of a list or array."""
    if hasattr(value, "data_ptr"):
        rows = getattr(value, "is_nested", False) or value.ndim > 1
        return list(value.unbind(0)) if rows else list(value)
    if hasattr(value, "dtype"):
        return list(value)
    return list(value.tolist() if hasattr(value, "tolist") else value)


def _count(mask: Any) -> int:
    return int(mask.sum()) if hasattr(mask, "sum") else sum(mask)
