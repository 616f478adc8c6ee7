"""`report`: one self-contained HTML file about a run."""

from pathlib import Path

import click

from rlk_ledger import terminal


@click.command()
@click.argument("run")
@click.option(
    "-o",
    "--output",
    metavar="FILE.html",
    type=click.Path(path_type=Path),
    help="Where to write it; report-RUN.html in this folder when not given.",
)
@click.option("--record/--no-record", default=True, help="Add a report.written event to the ledger (the default).")
@terminal.ledger_option
@terminal.output_options
def report(run: str, output: Path | None, record: bool, url: str | None, as_json: bool) -> None:
    """Write one self-contained HTML file about a run.

    It shows verdict, findings, drift, arms, worst samples and provenance, works offline and is made of the ledger
    alone; what was not measured is listed as such. Writing it again from the same record gives the same bytes.
    Exit codes: 0 written, whatever the verdict; 2 not written.
    """
    from rlk_ledger_replay.report import write_report
    from rlk_ledger_schemas.objects import check_run_id

    ledger = terminal.open_url(url)
    path = output if output is not None else Path(f"report-{check_run_id(run)}.html")
    info = write_report(ledger, run, path, record=record)
    if as_json:
        terminal.echo_json(
            {
                "run_id": run,
                "path": str(info.path),
                "digest": info.digest,
                "bytes": info.bytes,
                "verdict": info.verdict,
                "exit_code": info.exit_code,
                "recorded": info.recorded,
                "warning": info.warning,
            }
        )
        return
    terminal.say(f"{info.verdict}: {info.path.resolve()} ({terminal.size_text(info.bytes)})")
    if info.warning:
        click.echo(f"rlk-ledger: {info.warning}", err=True)
