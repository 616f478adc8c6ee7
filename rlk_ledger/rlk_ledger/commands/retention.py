"""`hold` and `prune`: what must be kept, and what may go."""

import re
import time
from typing import TYPE_CHECKING, Any

import click

from rlk_ledger import terminal

if TYPE_CHECKING:
    from rlk_ledger.holds import State
    from rlk_ledger.retention import Pruning

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


def age(text: str) -> float:
    """Seconds of a time such as 90d, 12h or 2w; raises click.BadParameter for anything else."""
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([smhdw])", text)
    if found is None:
        raise click.BadParameter(f"{text!r} is no age; write 90d, 12h, 30m or 2w.")
    return float(found[1]) * _UNITS[found[2]]


@click.command()
@click.argument("run")
@click.option("--reason", help="Why the run must be kept, or why it need not be any more.")
@click.option("--release", "hold_id", metavar="ID", help="Release the hold of this id.")
@click.option("--by", help="Who says so; user@host when not given.")
@terminal.ledger_option
@terminal.output_options
def hold(run: str, reason: str | None, hold_id: str | None, by: str | None, url: str | None, as_json: bool) -> None:
    """Forbid pruning a run, release that, or list its holds.

    With --reason a hold is placed; with --release ID it is released; with neither, the run's holds are listed. A hold
    stops a prune that is running before its next 64 segments. It binds `prune`, not somebody who may delete objects.
    """
    from rlk_ledger import holds

    ledger = terminal.open_url(url)
    found = ledger.run(run)
    by = by or holds.this_person()
    placed = None
    if hold_id is not None:
        holds.release(ledger.store, found.info, hold_id, by, reason)
    elif reason is not None:
        placed = holds.place(ledger.store, found.info, reason, by)
    listed = holds.read_holds(ledger.store, run)
    gone = found.pruned()
    if as_json:
        shown = [_fields(state) for state in listed]
        said = {"placed": placed and placed.hold_id, "released": hold_id, "holds": shown, "pruned": gone}
        terminal.echo_json({"ledger": ledger.url, "run_id": run, **said})
        return
    if placed is not None:
        terminal.say(f"run {run} is held: {placed.hold_id}. `prune` refuses until this hold is released.")
    for state in listed:
        terminal.say(_line(state))
    if not listed:
        terminal.say(f"run {run} has no holds; --reason TEXT places one.")
    if gone is not None:
        terminal.say(f"{gone.text}; no hold brings them back.")


def _fields(state: "State") -> dict[str, Any]:
    out: dict[str, Any] = {"hold_id": state.hold_id, "stands": state.stands, "problem": state.problem}
    for name, one in (("placed", state.hold), ("released", state.release)):
        out[name] = one and {"by": one.by, "reason": one.reason, "wall_us": one.wall_us}
    return out


def _line(state: "State") -> str:
    text = f"{state.hold_id}  {'stands' if state.stands else 'released'}"
    for word, one in (("placed", state.hold), ("released", state.release)):
        if one is not None:
            why = f": {one.reason}" if one.reason else ""
            text += f"; {word} {_day(one.wall_us)} by {one.by}{why}"
    return text + (f"; {state.problem}" if state.problem else "")


def _day(wall_us: int) -> str:
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(wall_us / 1e6))


@click.command()
@click.argument("run")
@click.option("--older-than", type=age, metavar="AGE", help="Segments committed longer ago than this: 90d, 12h, 2w.")
@click.option("--before-step", type=click.IntRange(min=0), metavar="N", help="Segments whose every step is below N.")
@click.option("--all", "everything", is_flag=True, help="Every segment that holds no tombstone.")
@click.option("--reason", help="Why; the tombstone repeats it.")
@click.option("--by", help="Who; user@host when not given.")
@click.option("--dry-run", is_flag=True, help="Say what would go, delete nothing, write nothing.")
@click.option("--open-writers", is_flag=True, help="Although writers of the run have not ended.")
@terminal.ledger_option
@terminal.output_options
def prune(
    run: str,
    older_than: float | None,
    before_step: int | None,
    everything: bool,
    reason: str | None,
    by: str | None,
    dry_run: bool,
    open_writers: bool,
    url: str | None,
    as_json: bool,
) -> None:
    """Delete whole segments of a run under a policy, after saying so in it.

    A tombstone is committed first, then the segments it names are deleted; receipts stay, so `verify` says pruned and
    not missing. It refuses while a hold stands, and deletes nothing that is damaged. Run again, it finishes what was
    cut short. It needs permission to delete, which no job needs. Exit codes: 0 done; 2 refused or stopped, the sentence
    says what was deleted until then.
    """
    from rlk_ledger.retention import Policy
    from rlk_ledger.retention import prune as delete

    ledger = terminal.open_url(url)
    policy = Policy(older_than, before_step, everything)
    with terminal.progress(f"prune {run}") as progress:
        done = delete(
            ledger,
            run,
            policy,
            reason=reason,
            by=by,
            dry_run=dry_run,
            open_writers=open_writers,
            progress=progress,
        )
    if as_json:
        terminal.echo_json({"ledger": ledger.url, **done._asdict()})
        return
    terminal.say(_said(done))


def _said(done: "Pruning") -> str:
    kept = ", ".join(f"{count} {why}" for why, count in done.kept.items())
    stay = f" Not chosen: {kept}." if kept else ""
    if not done.segments:
        return f"run {done.run_id}: the policy lets no segment go.{stay}"
    what = "1 segment" if done.segments == 1 else f"{done.segments} segments"
    stated = f", {done.stated} of them kept in the tombstone" if done.stated else ""
    size = f"{what} ({done.events} events{stated}, {terminal.size_text(done.bytes)})"
    if done.dry_run:
        return f"run {done.run_id}: {size} would be pruned; nothing was written or deleted.{stay}"
    before = f" {done.unfinished} had been named by an earlier tombstone." if done.unfinished else ""
    return f"run {done.run_id}: {size} pruned; `verify` says so from now on.{before}{stay}"
