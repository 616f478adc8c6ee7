"""Samples of dumps that hold whole sequences: one entry a token of prompt and response, in several columns.

Nothing in such a dump says where the prompt ends. It is taken to end where the loss begins: what lies before the first
token of the loss is prompt, everything after it is response, masked or not.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from rlk_ledger.classes import FINITE, MISSING
from rlk_ledger.importers.model import Ids, Mask, Scored, Source, Values
from rlk_ledger.importers.rows import Row


def response_start(mask: npt.NDArray[Any]) -> int:
    """Where the loss begins; the length of the sequence when it never does."""
    active = np.flatnonzero(mask)
    return int(active[0]) if active.size else len(mask)


def scored(
    row: Row, name: str, source: str, cut: slice, mask: Mask, ids: Ids, origin: Source, zeros_are_missing: bool
) -> Scored:
    """One side's column as a score of the response `cut` of it.

    `mask` and `ids` are the response's. A null is `missing`; so is an exact 0.0 at a masked token where the engine
    fills in what it never scored. An exact 0.0 at a token of the loss stays what it is, for the audit to judge.
    """
    values, missing = column(row, name, cut)
    if zeros_are_missing:
        missing = missing | ((mask == 0) & (values.view(np.uint32) == 0))
    classes = np.where(missing, MISSING, FINITE).astype(np.uint8) if missing.any() else None
    return Scored(source, values, origin, classes, ids=ids, mask=mask)


def column(row: Row, name: str, cut: slice) -> tuple[Values, npt.NDArray[np.bool_]]:
    """The part `cut` of a column: float32 values, and where the file has null."""
    length = len(row.rows("token_ids"))
    values, missing = row.values(name, length)[cut], row.nulls(name, length)[cut]
    return np.ascontiguousarray(values), missing
