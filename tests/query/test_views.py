"""SQL over a ledger: what the views hold, what they read, and what they refuse."""

import sys

import numpy as np
import pytest

from rlk_ledger.audit.view import make_view
from rlk_ledger.drift import overall
from rlk_ledger.history import load_history
from rlk_ledger.ledger import Ledger
from rlk_ledger.sql_scope import scope
from rlk_ledger.views import VIEWS
from rlk_ledger_schemas.errors import UsageError


def test_every_view_has_columns_even_without_rows(ledger: Ledger) -> None:
    for name in VIEWS:
        relation = ledger.sql(f"select * from {name} where run_id = 'nothing'")
        assert relation.columns, name
        assert relation.fetchall() == []


def test_tokens_holds_one_row_a_value(ledger: Ledger) -> None:
    rows = ledger.sql(
        "select source, count(*), count(distinct sample_id), sum(mask::int), count(abs_dlogp) from tokens "
        "where run_id = 'one' group by 1 order by 1"
    ).fetchall()
    assert rows == [("rollout", 120, 12, 96, 0), ("training", 120, 12, 96, 96)]


def test_drift_is_what_the_audit_compares(ledger: Ledger) -> None:
    view = make_view(load_history(ledger, "one"))
    rows = ledger.sql("select position, dlogp from drift where run_id = 'one' order by sample_id, position").fetchall()
    assert len(rows) == len(view.tokens) == 96
    assert np.array([r[1] for r in rows]) == pytest.approx(view.tokens.d, abs=0)
    steps = ledger.sql("select step, avg(abs_dlogp) from drift where run_id = 'one' group by 1 order by 1").fetchall()
    assert [round(mean, 4) for _, mean in steps] == [0.01, 0.02, 0.03]


def test_sql_gives_the_numbers_of_the_metrics(ledger: Ledger) -> None:
    """One definition: an aggregate over `drift`, the same over `tokens`, and what `rlk-ledger drift` prints."""
    sums = "avg(abs_dlogp), avg(dlogp), avg(-dlogp), quantile_cont(abs_dlogp, 0.99), max(abs_dlogp), count(dlogp)"
    of_drift = ledger.sql(f"select {sums} from drift where run_id = 'two'").fetchall()[0]
    of_tokens = ledger.sql(f"select {sums} from tokens where run_id = 'two'").fetchall()[0]
    total = overall(make_view(load_history(ledger, "two")))
    names = ("abs_dlogp_mean", "dlogp_mean", "kl_k1", "abs_dlogp_p99", "abs_dlogp_max")
    assert of_drift[:-1] == pytest.approx([total.values[name] for name in names], rel=1e-12)
    assert of_tokens == pytest.approx(of_drift, rel=1e-12)
    assert of_drift[-1] == total.tokens
    squares = "avg(rho), avg(rho * rho) - 1, avg(rho - 1 - dlogp), avg((rho not between 0.8 and 1.2)::int)"
    row = ledger.sql(f"select {squares} from drift where run_id = 'two'").fetchall()[0]
    names = ("ratio_mean", "chi2_token", "kl_k3", "clip_fraction")
    assert row == pytest.approx([total.values[name] for name in names], rel=1e-9, abs=1e-12)


def test_a_drift_row_has_its_place(ledger: Ledger) -> None:
    row = ledger.sql("select * from drift where run_id = 'one' order by abs_dlogp desc limit 1").to_arrow_table()
    place = row.to_pylist()[0]
    for name in ("sample_id", "position", "token_id", "engine", "weight_version", "training_contract", "rollout_rank"):
        assert place[name] is not None, name
    assert place["shard_rank"] is None
    assert place["position"] >= 2


def test_other_versions_stand_in_off_policy_and_not_in_drift(ledger: Ledger) -> None:
    lag = ledger.sql("select lag, count(*) from off_policy where run_id = 'two' group by 1").fetchall()
    assert lag == [(-1, 32)]
    assert ledger.sql("select count(*) from drift where run_id = 'two' and step = 2").fetchall() == [(0,)]


def test_an_event_shipped_twice_is_shown_once(ledger: Ledger) -> None:
    assert len(ledger.run("one").receipts) > 4
    twice = ledger.sql("select writer_id, seq from events where run_id = 'one' group by 1, 2 having count(*) > 1")
    assert twice.fetchall() == []
    assert ledger.sql("select count(*) from samples where run_id = 'one'").fetchall() == [(12,)]


def test_show_tables_lists_every_view_and_reads_nothing(ledger: Ledger, segments_read: list[str]) -> None:
    assert {row[0] for row in ledger.sql("show tables").fetchall()} == set(VIEWS)
    assert segments_read == []


def test_fields_of_every_event_are_json(ledger: Ledger) -> None:
    query = "select fields ->> '$.body.mode' from events where run_id = 'one' and type = 'contract.declared'"
    assert ledger.sql(query).fetchall() == [("processed",)] * 2


def test_arrays_are_list_columns(ledger: Ledger) -> None:
    query = "select len(values__float32), len(value_class__uint8) from logprobs where run_id = 'one' limit 1"
    assert ledger.sql(query).fetchall() == [(10, None)]


def test_only_segments_with_the_wanted_types_are_read(ledger: Ledger, segments_read: list[str]) -> None:
    ledger.sql("select * from knobs where run_id = 'one'").fetchall()
    few = len(segments_read)
    assert 0 < few < len(ledger.run("one").receipts)
    assert all("/one/" in path for path in segments_read)
    ledger.sql("select * from runs").fetchall()
    assert len(segments_read) == few


def test_a_result_is_an_arrow_table_or_says_what_another_form_needs(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = ledger.sql("select step, count(*) n from samples where run_id = 'two' group by 1 order by 1")
    table = result.arrow()
    assert [tuple(row.values()) for row in table.to_pylist()] == result.fetchall()
    for method, library in (("df", "pandas"), ("pl", "polars")):
        monkeypatch.setitem(sys.modules, library, None)
        with pytest.raises(UsageError, match=rf"^sql\(\)\.{method}\(\) needs {library}: pip install {library}"):
            getattr(result, method)()


def test_a_run_named_by_a_parameter_limits_what_is_read(ledger: Ledger, segments_read: list[str]) -> None:
    rows = ledger.sql("select count(*) from samples where run_id = $run and step >= $step", {"run": "two", "step": "1"})
    assert rows.fetchall() == [(8,)]
    assert {path.split("/")[1] for path in segments_read} == {"two"}


@pytest.mark.parametrize(
    ("query", "params", "views", "runs"),
    [
        ("select 1", None, set(), None),
        ("select * from drift", None, {"drift"}, None),
        ("select * from drift where run_id = 'a' and step > 1", None, {"drift"}, {"a"}),
        ("select * from drift where run_id = 'a' or step > 1", None, {"drift"}, None),
        ("select * from drift where run_id != 'a'", None, {"drift"}, None),
        ("select * from drift where run_id in ('a', 'b')", None, {"drift"}, {"a", "b"}),
        ("select * from drift where ? = run_id", ["a"], {"drift"}, {"a"}),
        ("with d as (select * from drift where run_id = 'a') select * from d", None, {"drift"}, {"a"}),
        ("select * from drift d join tokens t using (sample_id) where d.run_id = 'a'", None, {"drift", "tokens"}, None),
        (
            "select * from drift d, tokens t where d.run_id = 'a' and t.run_id = 'b'",
            None,
            {"drift", "tokens"},
            {"a", "b"},
        ),
        ("from drift where run_id = 'a' union all from drift", None, {"drift"}, None),
        ("select (select count(*) from knobs) from drift where run_id = 'a'", None, {"drift", "knobs"}, None),
    ],
)
def test_the_scope_of_a_query(query: str, params: object, views: set[str], runs: set[str] | None) -> None:
    got = scope(query, params)  # type: ignore[arg-type]
    assert got.views == views
    assert got.runs == (None if runs is None else frozenset(runs))


@pytest.mark.parametrize(
    "query",
    [
        "insert into drift values (1)",
        "create table x as select * from drift",
        "drop view drift",
        "copy drift to 'x.csv'",
        "attach 'x.db'",
        "install httpfs",
        "set threads = 1",
        "select 1; select 2",
        "selct 1",
        1,
        "select * from read_csv('/etc/hostname')",
        "select * from '/etc/hostname'",
        "select * from nothing_like_this",
        "select nothing_like_this from drift",
        "select * from drift where run_id = $unset",
    ],
)
def test_what_does_not_read_the_views_is_refused_in_one_sentence(ledger: Ledger, query: str) -> None:
    with pytest.raises(UsageError) as refused:
        ledger.sql(query).fetchall()
    assert "\n" not in str(refused.value)
    assert 10 < len(str(refused.value)) < 400


def test_local_python_tables_are_out_of_reach(ledger: Ledger) -> None:
    import pyarrow as pa

    secret = pa.table({"a": [1]})
    assert len(secret) == 1
    with pytest.raises(UsageError, match="does not exist"):
        ledger.sql("select * from secret")


def test_a_history_can_be_limited_by_a_condition(ledger: Ledger) -> None:
    history = load_history(ledger, "one", "turn = 1 and step < 2")
    assert len(history.samples) == 4
    assert len(history.scores) == 8
    assert len(load_history(ledger, "one", "turn = 1 and step < 2 -- the second turn").samples) == 4
    with pytest.raises(UsageError):
        load_history(ledger, "one", "no_such_column = 1")


NAMED = (
    "step, count(*), avg(abs_dlogp), quantile_cont(abs_dlogp, 0.9)",
    "group_id, engine, weight_version, max(rho), min(position), sum(token_id::int)",
    "turn, cached_tokens, chunks, response_length, rollout_rank, training_rank, count(shard_rank), max(dlogp)",
    "sample_id, attempt, pass_id, layout_id, rollout_contract, training_contract, max(rollout), min(training)",
)


@pytest.mark.parametrize("columns", NAMED)
def test_a_query_of_some_columns_gives_what_it_gives_over_all_of_them(ledger: Ledger, columns: str) -> None:
    lean = f"select {columns} from drift where run_id in ('one', 'two') group by all"
    whole = f"select {columns} from (select * from drift) where run_id in ('one', 'two') group by all"
    assert scope(lean).columns is not None
    assert scope(whole).columns is None
    rows = [sorted(map(repr, ledger.sql(query).fetchall())) for query in (lean, whole)]
    assert rows[0] == rows[1] != []


@pytest.mark.parametrize(
    ("query", "columns"),
    [
        ("select step, avg(abs_dlogp) from drift where run_id = 'x' group by step", {"step", "abs_dlogp", "run_id"}),
        ('select d."RHO" from drift d join off_policy o using (sample_id)', {"d", "rho", "sample_id"}),
        ("with n as (select rho as r from drift) select max(r) from n", {"rho", "r"}),
        ("select count(*) from drift", set()),
        ("select * from drift", None),
        ("select d from drift d", None),
        ("select #1 from drift", None),
        ("select columns('abs.*') from drift", None),
        ("summarize drift", None),
        ("select count(*) from drift natural join tokens", None),
        ("select a from drift d(a, b)", None),
        ("unpivot drift on rollout, training into name n value v", None),
    ],
)
def test_a_view_is_made_of_the_columns_a_query_can_mean(query: str, columns: set[str] | None) -> None:
    assert scope(query).columns == columns


def test_an_unknown_column_is_answered_with_those_there_are(ledger: Ledger) -> None:
    with pytest.raises(UsageError, match="abs_dlogp"):
        ledger.sql("select abs_dlop from drift")
