"""`doctor`: what a job will meet on this machine, and with --estimate what it will cost a bucket."""

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

import click

from rlk_ledger import terminal

if TYPE_CHECKING:
    from rlk_ledger.doctor.estimate import Amount, Estimate

_MARKS = {
    "ok": "ok     ",
    "note": "note   ",
    "warn": "WARN   ",
    "fail": "FAIL   ",
    "unknown": "UNKNOWN",
    "skipped": "skipped",
}
_STYLES = {"warn": "yellow", "fail": "bold red", "unknown": "bold magenta"}

_Command = TypeVar("_Command", bound=Callable[..., Any])


def _shape(name: str, metavar: str, type_: Any, default: Any, text: str) -> Callable[[_Command], _Command]:
    """An option that says what the run of --estimate looks like."""
    return click.option(name, type=type_, metavar=metavar, default=default, show_default=True, help=text)


@click.command()
@terminal.ledger_option
@click.option("--spool", metavar="DIR", help="The spool directory (default: RLK_SPOOL, else /var/tmp/rlk-UID).")
@click.option("--estimate", is_flag=True, help="Say what a run will write, from events of its shape; no check is made.")
@_shape("--tokens", "N", click.IntRange(1), 1_000_000, "Response tokens of the run.")
@_shape("--response", "N", click.IntRange(1), 512, "Response tokens a sample.")
@_shape("--prompt", "N", click.IntRange(0), 256, "Prompt tokens a sample.")
@_shape("--group", "N", click.IntRange(1), 8, "Samples that share a prompt.")
@_shape("--passes", "N", click.IntRange(1), 1, "Training passes over each sample.")
@_shape("--record", "LIST", str, "ids,rollout,training,layouts", "What is recorded.")
@_shape("--redaction", "HOW", click.Choice(["none", "hash", "drop"]), "none", "What leaves: none, hash or drop.")
@_shape("--processes", "N", click.IntRange(1), 2, "Recording processes.")
@_shape("--nodes", "N", click.IntRange(1), 1, "Machines, one shipper each.")
@_shape("--hours", "HOURS", click.FloatRange(0, min_open=True), 1.0, "Duration of the run.")
@_shape("--flush", "SECONDS", click.FloatRange(0), 0.0, "Time between flushes; 0 for none.")
@_shape("--checkpoint", "SECONDS", click.FloatRange(0), 300.0, "Time between checkpoints; 0 for none.")
@terminal.output_options
@click.pass_context
def doctor(
    ctx: click.Context, /, url: str | None, spool: str | None, estimate: bool, as_json: bool, **shape: object
) -> None:
    """Check this machine, its spool and the ledger before a job, or estimate what a run will write.

    One line a check: ok, note, warn, fail, unknown, skipped (no --ledger), with what to do. With a ledger, the
    put-if-absent probe leaves two small objects below canary/. Exit codes: 0 nothing fails and nothing is unknown
    (warnings included); 1 something fails; 3 something could not be told; 2 usage.
    """
    if estimate:
        from rlk_ledger.doctor.estimate import estimate as measure
        from rlk_ledger.doctor.workload import Workload

        with _looking() as tell:
            tell("a small run of this shape")
            found = measure(Workload.of(shape))
        _show(found, as_json)
        return
    given = [name for name in shape if ctx.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE]
    if given:
        raise click.UsageError(f"--{given[0]} says what a run looks like: give --estimate with it.")
    from rlk_ledger.doctor import doctor as look
    from rlk_ledger.doctor.check import Check, exit_code

    checks: list[Check] = []
    rows: list[dict[str, str | None]] = []
    shown = ""
    with _looking() as tell:
        for section, check in look(url, spool, tell):
            checks.append(check)
            rows.append(
                {
                    "section": section,
                    "name": check.name,
                    "state": check.state,
                    "text": check.text,
                    "advice": check.advice,
                }
            )
            if not as_json:
                if section != shown:
                    terminal.say(section)
                    shown = section
                _line(check.state, check.name, check.text, check.advice)
    code = exit_code(checks)
    if as_json:
        terminal.echo_json({"exit_code": code, "checks": rows})
        ctx.exit(code)
    terminal.say(_summary([check.state for check in checks]))
    ctx.exit(code)


def _line(state: str, name: str, text: str, advice: str | None) -> None:
    then = f" -> {advice}" if advice else ""
    terminal.say(f"  {_MARKS[state]} {name}: {text}{then}", style=_STYLES.get(state))


def _summary(states: list[str]) -> str:
    counts = [
        f"{states.count(state)} {state}"
        for state in ("fail", "unknown", "warn", "note", "skipped", "ok")
        if state in states
    ]
    word = "not fit" if "fail" in states else "not known to be fit" if "unknown" in states else "fit"
    return f"{word}: {', '.join(counts)}"


@contextlib.contextmanager
def _looking() -> Iterator[Callable[[str], None]]:
    """A line on stderr, in a terminal only, that says what is being looked at."""
    if not sys.stderr.isatty():
        yield lambda what: None
        return
    with terminal.console(stderr=True).status("looking") as status:
        yield lambda what: status.update(f"looking at {what}")


def _show(found: "Estimate", as_json: bool) -> None:
    million = found.per_million()
    if as_json:
        terminal.echo_json({"exit_code": 0, "estimate": found, "per_million_tokens": million})
        return
    work = found.workload
    terminal.say(
        f"{work.tokens:,} response tokens in {found.samples:,} samples of {work.response} ({', '.join(work.parts)}; "
        f"redaction {work.redaction}), {terminal.count(work.processes, 'process')} on "
        f"{terminal.count(work.nodes, 'node')}, {work.hours:g} h"
    )
    rows = [_row("per million tokens", million), _row("the whole run", found.total)]
    parts = dict(found.parts)  # the requests for a segment are counted with its receipt's: they go together
    parts = {"segments and receipts": parts.pop("segments") + parts.pop("receipts"), **parts}
    rows += [_row(f"  {name}", part) for name, part in parts.items()]
    terminal.table(["", "bytes", "PUT", "GET", "HEAD", "LIST"], rows, right=["bytes", "PUT", "GET", "HEAD", "LIST"])
    terminal.say(
        f"{terminal.count(found.events, 'event')} pass through the spools ({terminal.size_text(found.spool_bytes)}) "
        f"into {terminal.count(found.segments, 'segment')} and {terminal.count(found.checkpoints, 'checkpoint')}."
    )
    terminal.say(
        "Measured on generated events of this shape and scaled: real token ids may compress better. A segment leaves "
        "when it is full (64 MiB), 10 minutes old, or flushed; every retry, reader and verify comes on top."
    )


def _row(name: str, amount: "Amount") -> list[str]:
    counts = (f"{round(amount.requests[verb]):,}" for verb in ("PUT", "GET", "HEAD", "LIST"))
    return [name, terminal.size_text(round(amount.bytes)), *counts]
