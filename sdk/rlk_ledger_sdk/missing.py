"""Log-probability lists with holes: engines give None where they computed nothing (the first prompt position)."""

from typing import Any

from rlk_ledger_schemas.metrics import VALUE_CLASSES

_FINITE = VALUE_CLASSES.index("finite")
_MISSING = VALUE_CLASSES.index("missing")


def without_none(event: Any, fields: dict[str, Any]) -> bool:
    """Replaces every None in the `values` of a refused `logprobs` event by NaN and writes its value class.

    Returns False, changing nothing, when there is no None to replace.
    """
    values = fields.get("values")
    if event != "logprobs" or not isinstance(values, list | tuple) or all(v is not None for v in values):
        return False
    classes = fields.get("value_class")
    if classes is None:
        classes = [_FINITE] * len(values)
    else:
        classes = list(classes)
    for position, value in enumerate(values):
        if value is None and position < len(classes):
            classes[position] = _MISSING
    fields["values"] = [float("nan") if v is None else v for v in values]
    fields["value_class"] = classes
    return True
