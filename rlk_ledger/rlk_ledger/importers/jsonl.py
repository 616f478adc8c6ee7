"""Files of one JSON object a line."""

import json
from collections.abc import Iterator
from typing import Any

from rlk_ledger.importers.model import Source
from rlk_ledger.importers.rows import Row, shown
from rlk_ledger_schemas.errors import FormatError


def lines(source: Source) -> Iterator[Row]:
    """Every line of a file as a Row, blank ones left out; NaN and infinities as JSON libraries write them are read.

    Raises FormatError, without the file's name, for a line that is no JSON object, or names one field twice: JSON
    libraries do not agree which of the two counts.
    """
    with source.path.open("rb") as stream:
        for number, line in enumerate(stream, 1):
            if not line.strip():
                continue
            yield Row(_parsed(line, number), f"line {number}")


def _parsed(line: bytes, number: int) -> object:
    try:
        return json.loads(line, object_pairs_hook=_once)
    except _Twice as twice:
        raise FormatError(f"line {number} names the field {twice} twice.") from None
    except RecursionError:
        raise FormatError(f"line {number} is nested deeper than any dump.") from None
    except UnicodeDecodeError:
        raise FormatError(f"line {number} is no UTF-8 text.") from None
    except json.JSONDecodeError as error:
        what = "is cut off" if not line.endswith(b"\n") else "is no JSON"
        raise FormatError(f"line {number} {what}: {error.msg} at column {error.colno}.") from None
    except ValueError:
        raise FormatError(f"line {number} holds a number too long to be one.") from None


class _Twice(Exception):
    """A field that one JSON object has two of."""


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        raise _Twice(shown(next(name for name in found if names.count(name) > 1)))
    return found
