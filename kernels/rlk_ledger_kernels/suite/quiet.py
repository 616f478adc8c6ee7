"""Not a number, without a word: what a GPU computes in silence, Triton's interpreter has numpy warn of."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np


@contextmanager
def quiet() -> Iterator[None]:
    """Run the body, or the function this decorates, without numpy's warnings about its values."""
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        yield
