"""SQL over a ledger: DuckDB views, read-only, built from the segments the receipts say a query needs.

A query is parsed first: only the views it names are built (of `drift`, only the columns it names), only for the runs it
is limited to (`run_id = ...` in its WHERE), and only from segments holding those event types, and the samples
(`sample_id = ...`) and steps it asks for.
The connection can then neither reach files nor change its own settings. The same (writer, seq) shipped twice is shown
once.
"""

from collections.abc import Callable, Sequence

import duckdb
import pyarrow as pa

from rlk_ledger import event_tables, token_tables
from rlk_ledger.history import History
from rlk_ledger.ledger import Ledger
from rlk_ledger.receipts import SAMPLE_TYPES
from rlk_ledger.records import LIMIT
from rlk_ledger.sql_scope import Params, Scope, scope
from rlk_ledger_schemas.errors import UsageError

EVENTS: dict[str, tuple[str, ...]] = {
    "writers": ("writer.opened",),
    "samples": ("rollout.sample",),
    "logprobs": ("logprobs",),
    "decisions": ("operator.decided",),
    "knobs": ("knob.applied",),
    "contracts": ("contract.declared",),
    "collectives": ("collective.observed",),
    "timings": ("segment.timed",),
    "weights": ("weights.published", "weights.loaded"),
    "layouts": ("batch.layout",),
    "gaps": ("gap", "writer.lost"),
    "diagnostics": ("drift.diagnosed",),
    "admissions": ("batch.admitted",),
    "cases": ("case.attempted", "arm.scored"),
    "findings": ("finding.raised",),
    "verdicts": ("verdict.reached",),
}
"""Views that are the events of some types, one column a field."""

_WITH_ARRAYS = frozenset({"samples", "logprobs"})
VIEWS: tuple[str, ...] = ("runs", "events", *EVENTS, *token_tables.BUILDERS)


def sql(ledger: Ledger, query: str, params: Params = None) -> duckdb.DuckDBPyRelation:
    """The relation of a read-only query; `params` are a dict for `$name`, a list for `?`.

    Raises UsageError when the query is not one SELECT, names no known view or column, or lacks a parameter.
    """
    needed = scope(query, params)
    connection = connect(ledger, None, frozenset()) if needed.listing else _connect(ledger, needed)
    try:
        try:
            return _asked(connection, query, params)
        except duckdb.BinderException:  # an unknown column: the answer names all there are
            return _asked(_connect(ledger, needed._replace(columns=None)), query, params)
    except duckdb.Error as error:
        raise UsageError(_explained(error)) from None


def _asked(connection: duckdb.DuckDBPyConnection, query: str, params: Params) -> duckdb.DuckDBPyRelation:
    return connection.sql(query, params=params) if params else connection.sql(query)


def fetch(relation: duckdb.DuckDBPyRelation) -> pa.Table:
    """Every row of a relation; an error met while reading is one sentence, as in `sql`."""
    try:
        table = relation.to_arrow_table()
    except duckdb.Error as error:
        raise UsageError(_explained(error)) from None
    return table


def connect(
    ledger: Ledger, views: frozenset[str] | None = None, runs: frozenset[str] | None = None
) -> duckdb.DuckDBPyConnection:
    """A connection holding `views` (default all) of `runs` (default all), locked against files and settings."""
    return _connect(ledger, Scope(frozenset(VIEWS) if views is None else views, runs))


def _connect(ledger: Ledger, needed: Scope) -> duckdb.DuckDBPyConnection:
    chosen = ledger.runs(needed.runs)
    connection = duckdb.connect(":memory:", config={"python_enable_replacements": "false"})
    histories = _Histories(ledger, chosen, needed)
    for name in VIEWS:
        if name in needed.views:
            connection.register(name, _build(name, ledger, chosen, histories, needed))
    connection.execute("set enable_external_access = false").fetchall()
    connection.execute("set lock_configuration = true").fetchall()
    return connection


class _Histories:
    """Histories of the chosen runs, loaded once when a token view first asks; of the wanted samples where they suffice.

    A history of a sample holds all of its events and every fact about the run: its rows are those of the whole one.
    """

    def __init__(self, ledger: Ledger, runs: Sequence[str], needed: Scope) -> None:
        views = needed.views & token_tables.BUILDERS.keys()
        limited = views <= needed.samples.keys()
        samples = frozenset[str]().union(*(needed.samples[name] for name in views)) if limited else None
        self._load: Callable[[str], History] = lambda run_id: History.from_events(
            ledger.read_events(run_id, token_tables.NEEDS, samples), run_id
        )
        self._runs = runs
        self._held: list[History] | None = None

    def all(self) -> list[History]:
        if self._held is None:
            self._held = [self._load(run_id) for run_id in self._runs]
        return self._held


def _build(name: str, ledger: Ledger, runs: Sequence[str], histories: _Histories, needed: Scope) -> pa.Table:
    if name == "runs":
        return event_tables.runs_table(ledger, runs)
    if name == "events":
        return event_tables.events_table(ledger, runs)
    if name == "drift":
        return token_tables.drift_table(histories.all(), needed.columns)
    if name in token_tables.BUILDERS:
        return token_tables.BUILDERS[name](histories.all())
    steps = needed.steps.get(name)
    if steps is not None and not all(0 <= step < LIMIT for step in steps):
        steps = None  # receipts do not say these
    samples = needed.samples.get(name) if SAMPLE_TYPES.issuperset(EVENTS[name]) else None
    return event_tables.event_table(ledger, runs, EVENTS[name], name in _WITH_ARRAYS, steps, samples)


def _explained(error: duckdb.Error) -> str:
    """DuckDB's first line, and the views when a name is unknown."""
    lines = str(error).strip().splitlines()
    first = lines[0].removeprefix("Catalog Error: ").removeprefix("Binder Error: ").removeprefix("Parser Error: ")
    first = first.removeprefix("Invalid Input Error: ")
    if isinstance(error, duckdb.PermissionException):
        return "queries read the ledger's views only, no files and no extensions."
    if "does not exist" in first and "Table" in first:
        return f"{first} The views are {', '.join(VIEWS)}."
    candidates = next((line for line in lines if line.startswith("Candidate bindings")), "")
    return f"{first} {candidates}".strip()


def select_samples(ledger: Ledger, run_id: str, where: str) -> frozenset[str]:
    """Ids of the run's samples for which the SQL condition `where` (over the `samples` view) holds."""
    query = f"select distinct sample_id from samples where run_id = $run and ({where}\n)"
    rows = sql(ledger, query, {"run": run_id}).fetchall()
    return frozenset(row[0] for row in rows)
