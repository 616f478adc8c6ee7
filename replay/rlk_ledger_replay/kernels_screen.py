"""The certificate of the kernels for people: one line an operator and backend, what is wrong, one line that sums up."""

from __future__ import annotations

from collections.abc import Callable

import click

from rlk_ledger import terminal
from rlk_ledger_kernels.suite.certificate import COLUMNS, Certificate
from rlk_ledger_replay.kernels_record import Recorded
from rlk_ledger_replay.screen import Bar
from rlk_ledger_schemas.events.certificates import Checked, OperatorChecked, Unavailable

_TITLES = dict(zip(COLUMNS, ("invariance", "backward", "accuracy", "parity", "golden bits")))
_WORDS = {
    "passed": "ok",
    "failed": "FAILED",
    "refused": "refused",
    "not_claimed": "-",
    "not_recorded": "not recorded",
    "not_measured": "not measured",
}
_WIDE = 100
"""Columns from which the table fits."""


def follow(bar: Bar | None) -> Callable[[str, int, int], None]:
    """The progress callback of `certify`, drawn by `bar`."""

    def step(what: str, done: int, total: int) -> None:
        if bar is not None:
            bar.stage(what, total)
            bar.advance(done)

    return step


def show(certificate: Certificate, recorded: Recorded | None) -> None:
    """Print everything; the last line sums up."""
    if certificate.checked:
        _checked(certificate.checked)
        terminal.say("Numbers are the worst distance, as a share of the tolerance.", style="dim")
        terminal.say("")
    for one in certificate.checked:
        for column in COLUMNS:
            found = getattr(one, column)
            if found.outcome in ("failed", "refused"):
                terminal.say(f"{one.operator} ({one.backend}), {_TITLES[column]}: {found.detail}", style="red")
    for proof in certificate.missed:
        what = "it was not caught" if proof.caught is None else f"its right twin was accused: {proof.accused}"
        terminal.say(f"The {proof.wrong.suite} suite cannot be believed: {proof.wrong.mistake}: {what}", style="red")
    for text in _absent(certificate.unavailable):
        terminal.say(text, style="yellow")
    terminal.say(f"Class of device: {certificate.device_class}.", style="dim")
    if recorded is not None and recorded.not_recorded is None:
        terminal.say(f"Certificate recorded in run {recorded.run_id}.", style="dim")
    elif recorded is not None:
        terminal.say(f"Not recorded in the ledger: {recorded.not_recorded}", style="yellow")
    click.echo(summary(certificate))


def summary(certificate: Certificate) -> str:
    """One line: the verdict, what it rests on, or the first thing that is wrong."""
    operators = len({one.operator for one in certificate.checked})
    backends = ", ".join(dict.fromkeys(one.backend for one in certificate.checked)) or "no backend"
    caught = len(certificate.proofs) - len(certificate.missed)
    rests = (
        f"{terminal.count(operators, 'operator')} ({backends}) on {certificate.scope.device}, "
        f"{caught} of {len(certificate.proofs)} wrong operators caught"
    )
    why = _broken(certificate) or certificate.gap
    return " ".join(f"kernels check: {certificate.verdict}: {rests}{f'; {why}' if why else ''}".split())


def _broken(certificate: Certificate) -> str | None:
    """What is wrong of the operator lowest in the forward chain, without the evidence printed above it."""
    for one in certificate.checked:
        columns = [_TITLES[column] for column in COLUMNS if getattr(one, column).outcome == "failed"]
        if columns:
            return f"{one.operator} ({one.backend}) fails {', '.join(columns)}"
    return f"{certificate.missed[0].wrong.suite} cannot be believed" if certificate.missed else None


def _checked(checked: tuple[OperatorChecked, ...]) -> None:
    if terminal.console().width >= _WIDE:
        rows = [[one.operator, one.backend, *(_cell(getattr(one, column)) for column in COLUMNS)] for one in checked]
        terminal.table(["operator", "backend", *_TITLES.values()], rows)
        return
    for one in checked:
        cells = ", ".join(f"{_TITLES[column]} {_cell(getattr(one, column))}" for column in COLUMNS)
        terminal.say(f"{one.operator} ({one.backend}): {cells}")


def _cell(found: Checked) -> str:
    """The outcome, and beside it the worst distance as a share of the tolerance, or that every bit is equal."""
    word = _WORDS[found.outcome]
    if found.bitwise:
        return f"{word} bitwise"
    return word if found.share is None else f"{word} {found.share:.2f}"


def _absent(unavailable: tuple[Unavailable, ...]) -> list[str]:
    """Backends that could not run, those with one reason and one remedy together."""
    groups: dict[tuple[str, str, str | None], list[str]] = {}
    for one in unavailable:
        groups.setdefault((one.backend, one.reason, one.enable), []).append(one.operator)
    return [
        f"{backend} not measured ({', '.join(operators)}): {reason}" + (f"; {enable}" if enable else "")
        for (backend, reason, enable), operators in groups.items()
    ]
