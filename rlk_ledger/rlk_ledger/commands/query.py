"""`query` and `drift`: ask a ledger in SQL, and see drift by any recorded dimension."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rlk_ledger import terminal
from rlk_ledger_schemas.errors import UsageError

if TYPE_CHECKING:
    import pyarrow as pa

_BINARY = ("parquet", "arrow")
_COLUMNS = ("tokens", "abs_dlogp_mean", "abs_dlogp_p99", "abs_dlogp_max", "dlogp_mean", "kl_k3", "clip_fraction")


@click.command()
@click.argument("sql")
@click.option("--format", "format_", type=click.Choice(["table", "json", "csv", "parquet", "arrow"]), default="table")
@click.option("-p", "--param", "params", multiple=True, metavar="NAME=VALUE", help="A value for $NAME in the query.")
@click.option("-o", "--output", type=click.Path(dir_okay=False, path_type=Path), help="Write to a file.")
@terminal.ledger_option
@terminal.output_options
def query(sql: str, format_: str, params: tuple[str, ...], output: Path | None, url: str | None, as_json: bool) -> None:
    """Run one read-only SQL query over the ledger's views.

    Views: runs, events, writers, samples, logprobs, tokens, drift, off_policy, decisions, knobs, contracts, weights,
    layouts, collectives, gaps, timings, diagnostics, admissions, cases, findings, verdicts. `show tables` lists them,
    `describe samples` the columns of one.
    """
    from rlk_ledger import views

    format_ = "json" if as_json else format_
    if format_ in _BINARY and output is None and sys.stdout.isatty():
        raise click.UsageError(f"--format {format_} is binary; write it to a file with -o FILE or to a pipe.")
    ledger = terminal.open_url(url)
    relation = views.sql(ledger, sql, _parsed(params) or None)
    write(views.fetch(relation), format_, output)
    for run_id, pruned in ledger.pruned():
        click.echo(f"note: run {run_id}: {pruned.text}; the answer is about what is left.", err=True)


def _parsed(params: tuple[str, ...]) -> dict[str, str]:
    out = {}
    for text in params:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise click.UsageError(f"-p {text!r} is not NAME=VALUE.")
        out[name] = value
    return out


def write(table: "pa.Table", format_: str, output: Path | None) -> None:
    """Writes a result: a table for people, or one machine format with nothing else around it."""
    if format_ == "table" and output is None:
        _print_table(table)
        return
    data = encode(table, "csv" if format_ == "table" else format_)
    if output is None:
        sys.stdout.buffer.write(data)
        return
    try:
        output.write_bytes(data)
    except OSError as error:
        raise UsageError(f"cannot write {output}: {error.strerror or error}.") from None


def _print_table(table: "pa.Table") -> None:
    import pyarrow as pa

    numeric = [f.name for f in table.schema if pa.types.is_integer(f.type) or pa.types.is_floating(f.type)]
    rows = [[_cell(value) for value in row.values()] for row in table.to_pylist()]
    terminal.table(table.schema.names, rows, right=numeric)
    if not rows:
        terminal.say("no rows")


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.6g}"
    text = value if isinstance(value, str) else str(value)
    return text if len(text) <= 200 else text[:197] + "..."


def encode(table: "pa.Table", format_: str) -> bytes:
    """The bytes of a result as json, csv, parquet or arrow (an IPC stream)."""
    import pyarrow as pa

    sink = pa.BufferOutputStream()
    if format_ == "json":
        import msgspec

        rows = [{key: _plain(value) for key, value in row.items()} for row in table.to_pylist()]
        return msgspec.json.encode(rows) + b"\n"
    if format_ == "csv":
        return _csv(table)
    if format_ == "parquet":
        import pyarrow.parquet as pq

        pq.write_table(table, sink)
    else:
        with pa.ipc.new_stream(sink, table.schema) as stream:
            stream.write_table(table)
    return bytes(sink.getvalue().to_pybytes())


def _plain(value: Any) -> Any:
    """A value JSON can hold: bytes as hex, non-finite floats as text."""
    from rlk_ledger.audit.finding import plain

    if isinstance(value, bytes):
        return value.hex()
    return plain(value) if isinstance(value, dict | list | float) else value if _is_json(value) else str(value)


def _is_json(value: Any) -> bool:
    return value is None or isinstance(value, str | int | bool)


def _csv(table: "pa.Table") -> bytes:
    """RFC 4180: a header and rows; lists and structs as JSON text, null as an empty cell."""
    import csv
    import io
    import json

    buffer = io.StringIO(newline="")
    out = csv.writer(buffer, lineterminator="\n")
    out.writerow(table.schema.names)
    for row in table.to_pylist():
        cells = (_plain(value) for value in row.values())
        out.writerow("" if c is None else json.dumps(c) if isinstance(c, list | dict) else c for c in cells)
    return buffer.getvalue().encode()


@click.command()
@click.argument("run")
@click.option("--by", "dims", multiple=True, metavar="DIM", help="Split by a recorded dimension; repeat to combine.")
@click.option("--worst", type=click.IntRange(min=0), default=0, metavar="K", help="Show the K worst tokens.")
@terminal.ledger_option
@terminal.output_options
def drift(run: str, dims: tuple[str, ...], worst: int, url: str | None, as_json: bool) -> int:
    """Show a run's drift: its metrics, split by step, engine, rank, cache ... and its worst tokens.

    --by takes step, group, sample, engine, rank (of training), version, turn, cache, chunk, length, shard, layout,
    position or any recorded dimension; an unknown one lists them all. Nothing here is judged: a size of drift is judged
    by replay. Exit codes: 0, or 3 when no token was compared.
    """
    from rlk_ledger import drift as tables
    from rlk_ledger.audit.finding import plain
    from rlk_ledger.audit.view import make_view
    from rlk_ledger.history import load_history

    ledger = terminal.open_url(url)
    with terminal.progress(f"reading {run}") as tick:
        history = load_history(ledger, run, progress=tick)
    view = make_view(history)
    total = tables.overall(view)
    rows = tables.by(view, dims) if dims else []
    places = tables.worst(view, worst) if worst else []
    code = 0 if total.status == "measured" else 3
    if as_json:
        document: dict[str, Any] = {"run_id": run, "overall": total.to_dict(), "by": list(dims), "rows": rows}
        document |= {"worst": places, "pruned": history.pruned and history.pruned._asdict()}
        terminal.echo_json(plain(document))
        return code
    _say_overall(run, total.to_dict())
    if history.pruned is not None:
        terminal.say(f"{history.pruned.text}; this is about what is left.")
    if rows:
        terminal.table(
            (*dims, *_COLUMNS),
            [(*(row["level"][d] for d in dims), *_numbers(row)) for row in rows],
            right=_COLUMNS,
        )
    for place in places:
        terminal.say(_place(place))
    return code


def _say_overall(run: str, total: dict[str, Any]) -> None:
    if total["status"] != "measured":
        ask = f"`rlk-ledger audit {run}{terminal.named_ledger()}`"
        terminal.say(f"run {run}: no token was compared ({total['status']}); {ask} says why.")
        return
    terminal.say(f"run {run}: {total['tokens']} compared tokens of {total['samples']} samples", style="bold")
    names = [name for name in total["metrics"] if total["metrics"][name] is not None]
    terminal.table(("metric", "value"), [(name, f"{total['metrics'][name]:.6g}") for name in names], right=("value",))
    if total["clamped"]:
        terminal.say(f"{total['clamped']} log-ratios were clamped at +-20 before exp.")


def _numbers(row: dict[str, Any]) -> list[str]:
    values = [row["metrics"].get(name) for name in _COLUMNS[1:]]
    return [str(row["tokens"]), *("" if v is None else f"{v:.5g}" for v in values)]


def _place(place: dict[str, Any]) -> str:
    from rlk_ledger.commands.audit import short

    held = {name: value for name, value in place.items() if value is not None and name not in _NUMBERS}
    where = ", ".join(f"{name} {short(value)}" for name, value in held.items())
    numbers = f"d {place['dlogp']:+.5g} (rollout {place['rollout']:.5g}, training {place['training']:.5g})"
    return f"{numbers}: {where}"


_NUMBERS = ("rollout", "training", "dlogp")
