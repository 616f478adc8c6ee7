"""The screen of an explanation, for people: what happened, how sure, on which evidence, what to do next."""

from __future__ import annotations

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from rlk_ledger_replay.explain.answer import Explained
from rlk_ledger_replay.explain.result import NEXT, Explanation

_STYLE = {"reproduced": "bold red", "no_excess": "bold green", "reference_itself_is_broken": "bold red"}
SHOWN = 8


def render(found: Explanation) -> RenderableType:
    """Everything the screen shows; the first ten lines stand for the whole."""
    answer = found.answer
    title = ", ".join(answer.named) if answer.named else answer.answer.replace("_", " ")
    parts: list[RenderableType] = [
        Text.assemble(
            (answer.answer.replace("_", " ").upper(), _STYLE.get(answer.answer, "bold yellow")), f" · {title}"
        ),
        Text(answer.reason),
        Text(f"evidence: {_evidence(found)}"),
        Text(f"next: {NEXT[answer.answer]}"),
        Text(_separable(found)),
    ]
    if len(answer.members) > 1:
        parts.append(Text("alike within the floor: " + ", ".join(answer.members)))
    if answer.classes:
        parts += [Text(""), Text("Classes this data can tell apart:")]
        parts += [Text("  " + " = ".join(one)) for one in answer.classes]
    if answer.blind:
        parts.append(Text("Nothing here could show: " + ", ".join(answer.blind), style="dim"))
    if answer.ranked:
        parts += [Text(""), _table(answer.ranked[:SHOWN])]
    parts += [Text(f"Not tried: {name}: {reason}.", style="dim") for name, reason in found.unmet.items()]
    if found.not_recorded is not None:
        parts.append(Text(f"Not recorded in the ledger: {found.not_recorded}", style="yellow"))
    return Group(*parts)


def show(found: Explanation, console: Console) -> None:
    """Prints the screen."""
    console.print(render(found))


def _evidence(found: Explanation) -> str:
    answer, counts = found.answer, found.counts
    size = f"{counts['tokens']:,} tokens of {counts['samples']} samples in {counts['groups']} groups"
    where = f"run {found.run_id}, {found.side} side, {size}"
    if answer.multiple is None:
        return where
    multiple = answer.multiple
    return (
        f"{where}; {answer.distance:.3g} nats from what it declares, floor {answer.floor:.3g}: "
        f"{multiple.value:.2f} [{multiple.low:.2f}, {multiple.high:.2f}] times"
    )


def _separable(found: Explanation) -> str:
    answer = found.answer
    if answer.multiple is None:
        return "separable: nothing was scored, so no variant is ruled in or out"
    total = sum(map(len, answer.classes)) + len(answer.blind)
    return (
        f"separable: {len(answer.classes)} classes out of {total} variants; {len(answer.blind)} change nothing this "
        f"data could show, {len(found.unmet)} could not be tried"
    )


def _table(ranked: tuple[Explained, ...]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("variant (held-out groups)")
    for name in ("explains", "standard error", "amount", "left, nats"):
        table.add_column(name, justify="right")
    for one in ranked:
        table.add_row(one.name, f"{one.part:.1%}", f"{one.error:.1%}", f"{one.beta:.2f}", f"{one.left:.3g}")
    return table
