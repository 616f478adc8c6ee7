"""`diff`: two recorded runs side by side, the first thing that differs in front."""

from typing import TYPE_CHECKING, Any

import click

from rlk_ledger import terminal

if TYPE_CHECKING:
    from rlk_ledger.difference import Difference, Item
    from rlk_ledger.history import History
    from rlk_ledger.ledger import Ledger

_SHOWN = 8
_WIDE = 60


@click.command()
@click.argument("run_a")
@click.argument("run_b")
@click.option("--other-ledger", metavar="URL", help="The ledger of RUN_B, where it is another one.")
@terminal.ledger_option
@terminal.output_options
def diff(run_a: str, run_b: str, other_ledger: str | None, url: str | None, as_json: bool) -> int:
    """Compare two runs: provenance, contracts, weights, knobs, tokens, drift.

    The first thing that differs stands first, causes before what they cause. What one run did not record is unknown,
    never equal. Exit codes: 0 equal in everything compared, 1 something differs, 3 nothing differs but something is
    unknown, 2 a run could not be read.
    """
    from rlk_ledger.difference import compare_runs

    ledger = terminal.open_url(url)
    other = terminal.open_url(other_ledger) if other_ledger else ledger
    found = compare_runs(_read(ledger, run_a), _read(other, run_b))
    if as_json:
        terminal.echo_json(found.to_dict())
    else:
        _print(found)
    return found.exit_code


def _read(ledger: "Ledger", run: str) -> "History":
    from rlk_ledger.history import load_history

    with terminal.progress(f"reading {run}") as tick:
        return load_history(ledger, run, progress=tick)


def _print(found: "Difference") -> None:
    first = found.first
    names = f"{found.left} and {found.right}"
    if first is not None:
        terminal.say(f"first difference: {first.aspect}, {first.name}", style="bold red")
        terminal.say(f"{found.left}: {_text(first.left)}")
        terminal.say(f"{found.right}: {_text(first.right)}")
    elif found.exit_code:
        terminal.say(f"{names}: nothing that both recorded differs, and something is unknown", style="yellow")
    else:
        terminal.say(f"{names}: equal in everything compared", style="green")
    terminal.say("")
    terminal.table(
        ("aspect", "status", "equal", "differs", "unknown"),
        [(a.name, a.status if a.equal or a.items else "not recorded", a.equal, a.differs, a.unknown)
         for a in found.aspects],
        right=("equal", "differs", "unknown"),
    )  # fmt: skip
    for aspect in found.aspects:
        _print_items(found, aspect.name, [i for i in aspect.items or () if i.status == "differs"], aspect.differs)
        _print_items(found, aspect.name, [i for i in aspect.items or () if i.status == "unknown"], aspect.unknown)


def _print_items(found: "Difference", aspect: str, items: "list[Item]", count: int) -> None:
    if not items:
        return
    unknown = items[0].status == "unknown"
    terminal.say("")
    terminal.say(f"{aspect}: {terminal.count(count, 'value')} {'on one side only' if unknown else 'differ'}", "bold")
    terminal.table(("name", found.left, found.right), [(i.name, _text(i.left), _text(i.right)) for i in items[:_SHOWN]])
    if count > _SHOWN:
        terminal.say(f"{count - _SHOWN} more; --json lists the first {len(items)}.")


def _text(value: Any) -> str:
    if value is None:
        return "not recorded"
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    return text if len(text) <= _WIDE else text[: _WIDE - 3] + "..."
