"""`watch`: a run while it records, in the terminal, and what it raises."""

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import click

from rlk_ledger import terminal
from rlk_ledger_schemas.errors import LedgerError, UsageError

if TYPE_CHECKING:
    from rlk_ledger.audit import Finding
    from rlk_ledger.ledger import Ledger
    from rlk_ledger.watching import State, Watch
    from rlk_ledger.webhook import Webhook

_SHOWN = 12


@click.command()
@click.argument("run")
@click.option("--exit-on", "ends", metavar="FINDING", multiple=True, help="Leave with 1 when it is raised; repeatable.")
@click.option("--webhook", metavar="URL", help="Post each new finding there, as one JSON document.")
@click.option(
    "--interval", type=click.FloatRange(min=0.05), default=5.0, show_default=True, help="Seconds between looks."
)
@click.option("--once", is_flag=True, help="Look once, audit, and leave.")
@click.option("--until-closed", is_flag=True, help="Leave when every process that recorded has ended.")
@terminal.ledger_option
@terminal.output_options
def watch(
    run: str,
    ends: tuple[str, ...],
    webhook: str | None,
    interval: float,
    once: bool,
    until_closed: bool,
    url: str | None,
    as_json: bool,
) -> int:
    """Watch a run while it records: drift, coverage, lag, gaps and findings.

    Each look reads what was shipped since the last; an outage of the store is waited out. In a pipe every look that
    brought something is one line (one JSON document a line with --json). Ends when the run is sealed or on Ctrl-C.
    Exit codes: 1 an error was raised (or what --exit-on names), 3 a gap, 0 neither, 2 the watch could not begin.
    """
    from rlk_ledger.watching import Watch

    _check(ends)
    ledger = terminal.open_url(url)
    watched = Watch(ledger, run)
    with contextlib.ExitStack() as held:
        post = held.enter_context(_webhook(webhook)) if webhook else None
        stop = held.enter_context(_stopping())
        show = held.enter_context(_shown(as_json, once))
        hit = _follow(watched, ends, post, stop, show, interval, once, until_closed)
    if once and not watched.state.there:
        _refuse(ledger, watched)
    if post is not None and post.failed:
        terminal.tell(f"{terminal.count(post.failed, 'finding')} did not reach the webhook: {post.last_error}.")
    return 1 if hit else _code(watched.state)


def _check(ends: tuple[str, ...]) -> None:
    import difflib

    from rlk_ledger_schemas.findings import FINDINGS

    for name in ends:
        if name not in FINDINGS and name not in ("error", "gap"):
            near = difflib.get_close_matches(name, FINDINGS, n=1)
            hint = f"did you mean {near[0]!r}?" if near else "it is a finding id, `error` or `gap`."
            raise UsageError(f"--exit-on {name}: there is no such finding; {hint}")


def _refuse(ledger: "Ledger", watched: "Watch") -> None:
    if watched.state.trouble is not None:
        raise LedgerError(watched.state.trouble)
    _ = ledger.run(watched.state.run_id)


def _webhook(url: str) -> "Webhook":
    from rlk_ledger.webhook import Webhook

    return Webhook(url)


def _follow(
    watched: "Watch",
    ends: tuple[str, ...],
    post: "Webhook | None",
    stop: threading.Event,
    show: "Callable[[State, list[Finding], bool], None]",
    interval: float,
    once: bool,
    until_closed: bool,
) -> bool:
    """Looks until something ends it; returns whether that was a finding of `ends`."""
    while True:
        new = watched.look()
        state = watched.state
        over = once or state.sealed or (until_closed and state.writers > 0 and not state.open and not state.unread)
        over = (over and (once or not new)) or stop.is_set()
        raised = watched.judge(force=over)
        for finding in raised:
            if post is not None:
                post.send({"run_id": state.run_id, **finding.to_dict()})
        show(state, raised, new or bool(raised))
        if any(f.finding_id in ends or f.severity in ends for f in raised):
            return True
        if over:
            return False
        stop.wait(interval)


def _code(state: "State") -> int:
    from rlk_ledger_schemas.findings import exit_code

    code = exit_code(f.severity for f in state.findings)
    return 3 if code == 0 and (state.lost or state.trouble or state.unread) else int(code)


@contextlib.contextmanager
def _stopping() -> Iterator[threading.Event]:
    """An event that SIGINT and SIGTERM set, in the main thread; the handlers before are put back."""
    stop = threading.Event()
    before = {}
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            before[number] = signal.signal(number, lambda *_: stop.set())
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _shown(as_json: bool, once: bool) -> "Iterator[Callable[[State, list[Finding], bool], None]]":
    """How a look is shown: redrawn in a terminal, one line (or one document) a look in a pipe."""
    out = terminal.console()
    told: dict[str, str | None] = {"trouble": None}

    def line(state: "State", raised: "list[Finding]", new: bool) -> None:
        if not (new or once or state.looks == 1 or state.trouble != told["trouble"]):
            return
        told["trouble"] = state.trouble
        if as_json:
            import msgspec

            document = state.to_dict(time.time_ns() // 1000)
            terminal.echo_json(document) if once else click.echo(msgspec.json.encode(document).decode())
            return
        terminal.say(_line(state))
        for finding in raised:
            terminal.say(_finding(finding), style="bold")

    if as_json or once or not out.is_terminal:
        yield line
        return
    from rich.live import Live

    with Live(console=out, refresh_per_second=4) as live:
        yield lambda state, raised, new: live.update(_panel(state))


def _panel(state: "State") -> Any:
    from rich.console import Group
    from rich.text import Text

    rows = [Text(f"{name}: {value}") for name, value in _facts(state)]
    found = [
        Text(_finding(f), style="bold red" if f.severity == "error" else "yellow") for f in state.findings[-_SHOWN:]
    ]
    return Group(Text(f"watching {state.run_id}", style="bold"), *rows, *found)


def _facts(state: "State") -> list[tuple[str, str]]:
    if not state.there:
        return [("run", state.trouble or "not there yet")]
    drift = state.drift
    shown = (
        f"|d| mean {drift['abs_dlogp_mean']:.4g}, p99 {drift['abs_dlogp_p99']:.4g}, max {drift['abs_dlogp_max']:.4g}, "
        f"k3 {drift['kl_k3']:.3g} over {state.compared} tokens"
        if drift
        else "nothing compared yet"
    )
    rows = [
        ("drift", shown),
        ("coverage", "-" if state.coverage is None else f"{state.coverage:.1%}"),
        ("samples", f"{state.samples} ({state.waiting} wait for training)"),
        ("steps", f"rollout {_or(state.rollout_step)}, training {_or(state.training_step)}, lag {_or(state.lag)}"),
        ("writers", f"{state.open} of {state.writers} recording"),
        (
            "last segment",
            "-" if state.shipped_us is None else f"{max(0.0, time.time() - state.shipped_us / 1e6):.0f} s ago",
        ),
        ("lost", f"{state.gaps} events"),
    ]
    if state.unread or state.lost:
        rows.append(("segments", f"{state.unread} not whole yet, {state.lost} given up"))
    if state.trouble is not None:
        rows.append(("store", state.trouble))
    return rows + ([("sealed", "yes")] if state.sealed else [])


def _or(value: int | None) -> str:
    return "-" if value is None else str(value)


def _line(state: "State") -> str:
    return f"look {state.looks}: " + "; ".join(f"{name} {value}" for name, value in _facts(state))


def _finding(finding: "Finding") -> str:
    where = ", ".join(f"{k} {v}" for k, v in finding.where.items() if not isinstance(v, dict | list))
    return f"{finding.severity}: {finding.finding_id} - {finding.meaning} ({where})"
