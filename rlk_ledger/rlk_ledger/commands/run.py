"""`run -- CMD`: a job under a supervisor that ships what the job recorded before it leaves."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rlk_ledger import terminal

if TYPE_CHECKING:
    from rlk_ledger.leftovers import Left
    from rlk_ledger.supervise import Ended

GRACE_S = 60.0


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option(
    "--grace",
    type=click.FloatRange(0, 7 * 24 * 3600.0),
    default=GRACE_S,
    show_default=True,
    metavar="SECONDS",
    help="How long the end waits for the ledger.",
)
@click.option("--spool", metavar="DIR", help="The spool directory, as RLK_SPOOL for the command.")
@click.option("--ledger", "url", metavar="URL", help="The ledger, as RLK_LEDGER for the command.")
@terminal.output_options
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
@click.pass_context
def run(
    ctx: click.Context, grace: float, spool: str | None, url: str | None, as_json: bool, command: tuple[str, ...]
) -> None:
    """Run a job and ship what it recorded before leaving.

    `rlk-ledger run -- python train.py`: the command keeps its streams, terminal and signals; a shipper of its own
    session serves its spool. When the command has ended, what is left is shipped for up to --grace seconds, and what
    is committed and what still waits is said on stderr (--json: one document there). A second signal cuts that short.

    Exit codes are the command's own: its exit code, 128 + n when signal n ended it, 127 when it was not found, 126
    when it cannot be run; 2 when `run` itself was called wrongly.
    """
    from rlk_ledger.supervise import Supervisor, say
    from rlk_ledger_schemas.errors import ConfigError
    from rlk_ledger_sdk.config import checked_url, disabled, spool_folder

    if spool is not None:
        os.environ["RLK_SPOOL"] = spool
    if url is not None:
        try:
            checked_url(url, "--ledger")  # before the job runs; passed on as it was given: the directory is the job's
        except ConfigError as error:
            raise click.UsageError(str(error).removeprefix("init: ")) from None
        os.environ["RLK_LEDGER"] = url
    folder = spool_folder()
    supervisor = Supervisor(folder, grace, say, ship=not disabled())
    ended = supervisor.run(command)
    if ended.started and not disabled():
        _report(folder, ended, supervisor.earlier, as_json)
    ctx.exit(ended.code)


def _report(folder: Path, ended: "Ended", earlier: set[str], as_json: bool) -> None:
    """Says what is committed and what waits; a statement that cannot be made must not change the job's exit code."""
    from rlk_ledger.supervise import say

    try:
        lines, document = _statement(folder, ended, earlier)
    except Exception as error:
        say(f"what is left in {folder} cannot be told ({error}); `rlk-ledger recover {folder}` ships it.")
        return
    if as_json:
        import msgspec

        click.echo(msgspec.json.encode(document).decode(), err=True)
        return
    for line in lines:
        say(line)


def _statement(folder: Path, ended: "Ended", earlier: set[str]) -> tuple[list[str], dict[str, Any]]:
    if ended.drained:
        left: list[Left] = []
    else:
        from rlk_ledger.leftovers import look

        left = [one for one in look(folder) if one.writer_id not in earlier] if folder.is_dir() else []
    waiting = [one for one in left if one.waiting]
    events = sum(one.waiting for one in waiting)
    document = {
        "spool": str(folder),
        "exit_code": ended.code,
        "drained": ended.drained,
        "waiting_events": events,
        "alive": ended.alive,
        "writers": left,
    }
    return _lines(folder, ended, waiting, events), document


def _lines(folder: Path, ended: "Ended", waiting: "list[Left]", events: int) -> list[str]:
    if ended.drained:
        if not os.environ.get("RLK_LEDGER"):
            return [
                "nothing is left to ship; RLK_LEDGER is not set: a job that names no ledger itself records nothing."
            ]
        return ["everything that was recorded is committed."] if folder.is_dir() else []
    lines = []
    if waiting:
        why = (
            "a signal ended the wait" if ended.cut else next((one.error for one in waiting if one.error), "time is up")
        )
        lines.append(
            f"{_count(events, 'event')} of {_count(len(waiting), 'writer')} are not committed yet ({why}). "
            f"They are safe in {folder}; `rlk-ledger recover {folder}` ships them."
        )
        lines += [
            f"  writer {one.writer_id}, run {one.run_id}: {_committed(one)}, {one.waiting} wait" for one in waiting[:20]
        ]
        lines += [f"  and {len(waiting) - 20} more writers"] if len(waiting) > 20 else []
    else:
        lines.append(f"every event in {folder} is committed.")
    if ended.alive:
        pids = ", ".join(map(str, ended.alive[:20]))
        lines.append(f"{_count(len(ended.alive), 'process')} of the job still record (pid {pids}).")
    return lines


def _committed(one: "Left") -> str:
    return "nothing committed" if one.committed < 0 else f"committed up to event {one.committed}"


def _count(number: int, noun: str) -> str:
    plural = noun + ("es" if noun.endswith("s") else "s")
    return f"{number:,} {noun if number == 1 else plural}"
