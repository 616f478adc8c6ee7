"""What a query needs before it runs: that it only reads, which views it names, and which runs, samples and steps it is
limited to.

DuckDB's own parser answers, through `json_serialize_sql`, which serialises SELECT statements and nothing else.
"""

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

import duckdb

from rlk_ledger_schemas.errors import UsageError

Params = dict[str, Any] | list[Any] | None


class Scope(NamedTuple):
    """`views`: names of tables the query reads. `runs`: run ids it is limited to, or None when it may read any.

    `listing`: the query asks which tables there are (`show tables`), not what they hold. `samples` and `steps`: the
    sample ids and steps wanted of a view; one that is not there is wanted whole. `columns`: every name that a column of
    a view could be meant by, in lower case, or None when the query may take any.
    """

    views: frozenset[str]
    runs: frozenset[str] | None
    listing: bool = False
    samples: Mapping[str, frozenset[str]] = {}
    steps: Mapping[str, frozenset[int]] = {}
    columns: frozenset[str] | None = None


class _Limit(NamedTuple):
    """A column that has to be one of some values; `qualifier` names its table where the query does."""

    qualifier: str | None
    column: str
    values: frozenset[Any]


class _Select(NamedTuple):
    tables: list[tuple[str, str]]
    limits: list[_Limit]


def scope(query: str, params: Params = None) -> Scope:
    """The scope of one SELECT query; raises UsageError when it does not parse or is anything but a SELECT."""
    if not isinstance(query, str):
        raise UsageError(f"a query is one SELECT as text, got {query!r}.")
    with duckdb.connect(":memory:") as connection:
        row = connection.execute("select json_serialize_sql(?)", [query]).fetchall()[0]
    tree = json.loads(row[0])
    if tree["error"]:
        raise UsageError(_refusal(tree))
    if len(tree["statements"]) != 1:
        raise UsageError(f"one SELECT a query; this text holds {len(tree['statements'])} statements.")
    if (tree["statements"][0]["node"].get("from_table") or {}).get("show_type") == "SHOW_SPECIAL":
        return Scope(frozenset(), None, listing=True)
    selects: list[_Select] = []
    _walk(tree["statements"][0], frozenset(), params, selects)
    views = frozenset(name for select in selects for _, name in select.tables)
    by_view = {column: _by_view(selects, column) for column in _KINDS}
    runs = None
    if views and by_view["run_id"].keys() == views:
        runs = frozenset[str]().union(*by_view["run_id"].values())
    return Scope(views, runs, samples=by_view["sample_id"], steps=by_view["step"], columns=_columns(tree["statements"]))


def _columns(statements: Any) -> frozenset[str] | None:
    """Names of columns a query speaks of, None where it may mean others too: `*`, `#1`, a whole row, a natural join."""
    names: set[str] = set()
    rows: set[str] = set()
    alone: set[str] = set()
    left = [statements]
    while left:
        node = left.pop()
        if isinstance(node, list):
            left += node
        elif isinstance(node, dict):
            if _takes_any(node):
                return None
            said = [name.lower() for name in (*_texts(node, "column_names"), *_texts(node, "using_columns"))]
            names.update(said)
            alone.update(said[:1] if len(said) == 1 else ())
            rows.update(str(node.get(key)).lower() for key in ("table_name", "alias") if "sample" in node)
            left += node.values()
    return None if alone & rows else frozenset(names)


def _takes_any(node: dict[str, Any]) -> bool:
    whole = node.get("class") in ("STAR", "POSITIONAL_REFERENCE") or node.get("type") in ("SHOW_REF", "PIVOT")
    return whole or node.get("ref_type") == "NATURAL" or bool(node.get("column_name_alias"))


def _texts(node: dict[str, Any], key: str) -> list[str]:
    held = node.get(key)
    return [text for text in held if isinstance(text, str)] if isinstance(held, list) else []


def _by_view(selects: list[_Select], column: str) -> dict[str, frozenset[Any]]:
    """The values of a column wanted of each view, for the views that are limited wherever the query names them."""
    found: dict[str, frozenset[Any]] = {}
    whole = set()
    for select in selects:
        for alias, name in select.tables:
            limit = _limit(select, alias, column)
            if limit is None:
                whole.add(name)
            else:
                found[name] = found.get(name, frozenset()) | limit
    return {name: values for name, values in found.items() if name not in whole}


def _refusal(tree: dict[str, Any]) -> str:
    if tree.get("error_type") == "not implemented":
        return "only SELECT queries run here: a ledger is append-only and its views are read-only."
    return f"the query does not parse ({tree.get('error_message', 'no reason given')})."


def _limit(select: _Select, alias: str, column: str) -> frozenset[Any] | None:
    """Values a column of a table of a SELECT is limited to by its own WHERE, if it is."""
    for limit in select.limits:
        own = limit.qualifier == alias or (limit.qualifier is None and len(select.tables) == 1)
        if own and limit.column == column:
            return limit.values
    return None


def _walk(node: Any, hidden: frozenset[str], params: Params, out: list[_Select]) -> None:
    """Collects every SELECT node; `hidden` are names of common table expressions in sight."""
    if isinstance(node, list):
        for item in node:
            _walk(item, hidden, params, out)
    elif isinstance(node, dict):
        hidden = hidden | {entry["key"] for entry in (node.get("cte_map") or {}).get("map", ())}
        if node.get("type") == "SELECT_NODE":
            tables: list[tuple[str, str]] = []
            _tables(node.get("from_table"), hidden, tables)
            limits: list[_Limit] = []
            _limits(node.get("where_clause"), params, limits)
            out.append(_Select(tables, limits))
        for value in node.values():
            _walk(value, hidden, params, out)


def _tables(node: Any, hidden: frozenset[str], out: list[tuple[str, str]]) -> None:
    """(alias, name) of the tables a FROM clause names itself; subqueries are SELECT nodes of their own."""
    if not isinstance(node, dict):
        return
    if node.get("type") == "BASE_TABLE":
        name = node["table_name"].lower()
        if name not in hidden:
            out.append(((node.get("alias") or name).lower(), name))
    elif node.get("type") == "JOIN":
        _tables(node.get("left"), hidden, out)
        _tables(node.get("right"), hidden, out)


def _limits(node: Any, params: Params, out: list[_Limit]) -> None:
    """`column = value` and `column in (values)` among the conditions that are all required."""
    if not isinstance(node, dict):
        return
    if node.get("type") == "CONJUNCTION_AND":
        for child in node["children"]:
            _limits(child, params, out)
    elif node.get("type") == "COMPARE_EQUAL":
        for column, value in ((node["left"], node["right"]), (node["right"], node["left"])):
            _add_limit(column, [value], params, out)
    elif node.get("type") == "COMPARE_IN":
        _add_limit(node["children"][0], node["children"][1:], params, out)


def _add_limit(column: Any, values: list[Any], params: Params, out: list[_Limit]) -> None:
    names = [name.lower() for name in column.get("column_names", ())]
    if column.get("type") != "COLUMN_REF" or not names or names[-1] not in _KINDS:
        return
    found = [_constant(value, params) for value in values]
    if found and all(type(value) is _KINDS[names[-1]] for value in found):  # other types are cast: more may be equal
        out.append(_Limit(names[-2] if len(names) > 1 else None, names[-1], frozenset(found)))


_KINDS: dict[str, type] = {"run_id": str, "sample_id": str, "step": int}


def _constant(node: Any, params: Params) -> Any:
    """The text or integer a node stands for, None for anything else."""
    if node.get("type") == "VALUE_CONSTANT":
        literal = node.get("literal") or {}
        kind, text = literal.get("kind"), literal.get("text")
        if not isinstance(text, str):
            return None
        return text if kind == "STRING" else int(text) if kind == "INTEGER" else None
    if node.get("type") == "VALUE_PARAMETER" and params is not None:
        key = str(node.get("identifier"))
        if isinstance(params, dict):
            return params.get(key)
        return params[int(key) - 1] if key.isdigit() and 0 < int(key) <= len(params) else None
    return None
