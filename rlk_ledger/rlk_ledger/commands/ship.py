"""`ship` and `recover`: from the spool into the ledger by hand."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from rlk_ledger import terminal

if TYPE_CHECKING:
    from rlk_ledger.leftovers import Left
    from rlk_ledger.recover import Recovered, RunTotal


@click.command()
@click.option("--spool", metavar="DIR", help="The spool directory (default: RLK_SPOOL, else /var/tmp/rlk-UID).")
@click.option("--until-idle", is_flag=True, help="Leave when everything is shipped and no writer lives.")
@click.option(
    "--grace",
    type=click.FloatRange(0, 7 * 24 * 3600.0),
    default=0.0,
    metavar="SECONDS",
    help="How long to go on after a signal while a writer lives; a second signal ends it.",
)
@terminal.output_options
@click.pass_context
def ship(ctx: click.Context, spool: str | None, until_idle: bool, grace: float, as_json: bool) -> None:
    """Carry events from a spool directory into their ledgers.

    Runs until stopped; each spool names its ledger. Returns at once when another shipper serves the spool. Exit codes:
    0 shipped or stopped; 1 gave up on a bucket that did not answer, or was stopped before everything was shipped: the
    events stay in the spool.
    """
    import signal
    import threading

    from rlk_ledger.spawn import stay_small

    stay_small()
    from rlk_ledger.service import serve
    from rlk_ledger_sdk.config import spool_place
    from rlk_ledger_sdk.status import lock_is_free

    folder = spool_place(spool)[0]
    if until_idle and not folder.is_dir():
        raise click.UsageError(f"{folder} is not a directory: nothing was spooled there; check --spool and RLK_SPOOL.")
    if folder.is_dir() and not lock_is_free(folder):
        if as_json:  # what waits is the other one's to count
            terminal.echo_json({"spool": str(folder), "exit_code": 0, "waiting_events": None})
        else:
            terminal.say(f"another shipper serves {folder}; it ships what is there.")
        return
    stop, halt = threading.Event(), threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: halt.set() if stop.is_set() else stop.set())
    code = serve(
        folder,
        until_idle,
        stop,
        tell=lambda error: click.echo(f"waiting: {error}", err=True),
        grace_s=grace,
        halt=halt,
    )
    left = _waiting(folder) if code or stop.is_set() else 0
    code = 1 if left else code
    if as_json:
        terminal.echo_json({"spool": str(folder), "exit_code": code, "waiting_events": left})
    elif left:
        why = "stopped" if stop.is_set() else "gave up: the bucket does not answer"
        terminal.say(f"{why}. The events are safe in {folder}: {left} wait, `rlk-ledger recover {folder}` ships them.")
    elif until_idle and not code and not stop.is_set():
        terminal.say(f"{folder} is idle: what it held is committed.")
    ctx.exit(code)


def _waiting(spool: Path) -> int:
    """Events in the spool that no shipper called committed."""
    from rlk_ledger.leftovers import look

    return sum(one.waiting for one in look(spool)) if spool.is_dir() else 0


@click.command()
@click.argument("spool", type=click.Path(path_type=Path))
@click.option("--ledger", "url", metavar="URL", help="Send the events here instead of where the spool says.")
@click.option("--assume-dead", is_flag=True, help="The machines the writers ran on are gone.")
@click.option("--dry-run", is_flag=True, help="Say what is there and would be shipped; change and contact nothing.")
@click.option(
    "--wait",
    type=click.FloatRange(0, 7 * 24 * 3600.0),
    default=0.0,
    metavar="SECONDS",
    help="How long to go on asking a bucket that does not answer.",
)
@terminal.output_options
@click.pass_context
def recover(
    ctx: click.Context, spool: Path, url: str | None, assume_dead: bool, dry_run: bool, wait: float, as_json: bool
) -> None:
    """Ship what a crashed job left in SPOOL; say what was saved.

    SPOOL is a spool directory or one writer's directory in it. Exit codes: 0 everything is in the ledger, or there was
    nothing; 1 a bucket did not take all events, they stay in the spool; 3 bytes that were no whole event are lost, or
    a file cannot be read, the rest was saved; 2 SPOOL is none, or a shipper serves it. With --dry-run: 0, or 3 where
    something would be lost.
    """
    if dry_run:
        _preview(ctx, spool, assume_dead, url, as_json)
        return
    from rlk_ledger.recover import outcome, totals
    from rlk_ledger.recover import recover as save

    with terminal.progress("recovering") as progress:
        found = save(spool, url, assume_dead, wait_s=wait, progress=progress)
    word = outcome(found)
    code = {"saved": 0, "nothing": 0, "waiting": 1, "saved_with_loss": 3}[word]
    runs = totals(found)
    if as_json:
        document = {"spool": str(spool.absolute()), "exit_code": code, "outcome": word, "runs": runs, "writers": found}
        terminal.echo_json(document)
        ctx.exit(code)
    if not found:
        terminal.say(f"{spool} holds no spool files: nothing to recover.")
    for item in found:
        place = f", run {item.run_id}, ledger {item.ledger}" if item.run_id else ""
        terminal.say(f"writer {item.writer_id}, {item.state}{place}")
        terminal.say(f"       {_statement(item)}")
    for run in runs:
        if run.sealed:
            terminal.say(f"run {run.run_id} was sealed before: `rlk-ledger verify {run.run_id}` names what came late.")
    if found:
        terminal.say(_total(runs, word))
    ctx.exit(code)


def _preview(ctx: click.Context, spool: Path, assume_dead: bool, url: str | None, as_json: bool) -> None:
    from rlk_ledger.recover import preview

    found = preview(spool, assume_dead)
    code = 3 if any(one.lost_bytes or one.state == "unreadable" for one in found) else 0
    if as_json:
        terminal.echo_json({"spool": str(spool.absolute()), "exit_code": code, "dry_run": True, "writers": found})
        ctx.exit(code)
    if not found:
        terminal.say(f"{spool} holds no spool files: nothing to recover.")
    for one in found:
        place = f", run {one.run_id}, ledger {url or one.ledger}" if one.run_id else ""
        terminal.say(f"writer {one.writer_id}, {one.state}{place}")
        terminal.say(f"       {_intention(one)}")
    ctx.exit(code)


def _intention(one: "Left") -> str:
    if one.state == "unreadable":
        return f"{one.problem or 'no file has a readable header'}; {one.lost_bytes} bytes stay where they are."
    parts = [
        f"{one.events} whole events in {terminal.size_text(one.size)}: {one.waiting} would be shipped, "
        f"{one.events - one.waiting} were called committed (the ledger was not asked)"
    ]
    parts.append(f"{one.lost_bytes} bytes are no whole event and would be lost" if one.lost_bytes else _TAIL[one.state])
    if one.problem:
        parts.append(one.problem.rstrip("."))
    return "; ".join(parts) + "."


_TAIL = {
    "closed": "nothing would be lost",
    "dead": "nothing would be lost",
    "alive": "the writer still runs, its newest file would be left alone",
    "unknown": "it ran where this machine cannot look: its newest file would be left alone without --assume-dead",
}


def _total(runs: "list[RunTotal]", word: str) -> str:
    shipped, known = sum(run.shipped for run in runs), sum(run.known for run in runs)
    waiting, lost = sum(run.waiting for run in runs), sum(run.lost_bytes for run in runs)
    saved = f"{shipped} events shipped, {known} were in the ledger before"
    if word == "waiting":
        return f"not all saved: {saved}, {waiting} wait in the spool; run this again when the bucket answers."
    if word == "saved_with_loss":
        return f"saved with loss: {saved}, {lost} bytes are lost or stay unread."
    return f"all saved: {saved}." if shipped else f"nothing new: {saved}."


def _statement(item: "Recovered") -> str:
    parts = [f"{item.events} whole events in the spool: {item.shipped} shipped now, {item.known} were in the ledger"]
    if item.waiting:
        parts.append(f"{item.waiting} wait in the spool ({item.problem})")
    elif item.problem:
        parts.append(item.problem.rstrip("."))
    parts.append(f"{item.lost_bytes} bytes were no whole event and are lost" if item.lost_bytes else "nothing was lost")
    if item.state == "alive":
        parts.append("the writer still runs, its newest file was left alone")
    elif item.state == "unknown":
        parts.append(
            "it ran where this machine cannot look, its newest file was left alone; --assume-dead if it is gone"
        )
    damaged = [name for name in item.files_left if name.endswith(".damaged")]
    if damaged:
        parts.append(f"set aside for a person to look at: {', '.join(damaged)}")
    return "; ".join(parts) + "."
