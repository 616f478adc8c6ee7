"""What commands share: their common options, human output that fits the terminal, and JSON output.

In a terminal text wraps at its width and may have colour; in a pipe there is no colour and nothing is wrapped or cut.
"""

import contextlib
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import click
import msgspec

if TYPE_CHECKING:
    from rich.console import Console

    from rlk_ledger.ledger import Ledger

_F = TypeVar("_F", bound=Callable[..., Any])
_PIPE_WIDTH = 100_000
_READABLE = 16
"""The least width a wider column is folded to."""
_BETWEEN = 3
"""What rich puts between two columns."""


def ledger_option(command: _F) -> _F:
    """--ledger URL, from RLK_LEDGER when not given."""
    return click.option("--ledger", "url", metavar="URL", envvar="RLK_LEDGER", help="The ledger: a path or a URL.")(
        command
    )


def output_options(command: _F) -> _F:
    """--json (one document with stable keys) and --debug (a traceback before the sentence)."""
    command = click.option("--debug", is_flag=True, expose_value=False, help="Show a traceback on errors.")(command)
    return click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")(command)


def require_url(url: str | None) -> str:
    """`url`; raises click.UsageError when none was given."""
    if not url:
        raise click.UsageError("which ledger? Give --ledger URL or set RLK_LEDGER.")
    return url


def named_ledger() -> str:
    """` --ledger URL` for a command to run next, where the URL came with this call; empty where RLK_LEDGER has it."""
    context = click.get_current_context()
    given = context.get_parameter_source("url") is click.core.ParameterSource.COMMANDLINE
    return f" --ledger {shlex.quote(context.params['url'])}" if given else ""


def open_url(url: str | None) -> "Ledger":
    """The ledger of --ledger / RLK_LEDGER; raises click.UsageError without one, LedgerError when it is not there."""
    from rlk_ledger.ledger import open_ledger

    return open_ledger(require_url(url))


def echo_json(document: Any) -> None:
    """Prints one JSON document, two spaces of indentation."""
    click.echo(msgspec.json.format(msgspec.json.encode(document), indent=2).decode())


def console(stderr: bool = False) -> "Console":
    """A rich console for stdout (or stderr)."""
    from rich.console import Console

    class Output(Console):
        def on_broken_pipe(self) -> None:  # rich would leave with 1, which here means a finding
            raise BrokenPipeError

    stream = sys.stderr if stderr else sys.stdout
    if stream.isatty():
        return Output(stderr=stderr, highlight=False, emoji=False, markup=False)
    return Output(
        file=stream,
        color_system=None,
        force_terminal=False,
        width=_PIPE_WIDTH,
        highlight=False,
        emoji=False,
        markup=False,
    )


def table(headers: Sequence[str], rows: Sequence[Sequence[Any]], right: Sequence[str] = ()) -> None:
    """Prints a table; the columns named in `right` are right-aligned. Long cells fold in a terminal.

    Where a terminal is so narrow that folding would leave some column less than a word, rows become paragraphs of
    `header: cell` lines, empty cells left out.
    """
    from rich import box
    from rich.table import Table
    from rich.text import Text

    if _too_narrow(headers, rows, console().width):
        for row in rows:
            for header, cell in zip(headers, row):
                if cell not in (None, ""):
                    say(f"{header}: {cell}")
            say("")
        return
    out = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for header in headers:
        out.add_column(header, justify="right" if header in right else "left", overflow="fold")
    for row in rows:
        out.add_row(*(Text("" if cell is None else str(cell)) for cell in row))
    console().print(out)


def _too_narrow(headers: Sequence[str], rows: Sequence[Sequence[Any]], width: int) -> bool:
    """Whether columns of their own width, or of a readable width where they are wider, do not fit `width`."""
    texts = [[header, *("" if row[k] is None else str(row[k]) for row in rows)] for k, header in enumerate(headers)]
    wanted = [min(max(map(len, column)), _READABLE) for column in texts]
    return sum(wanted) + _BETWEEN * (len(headers) - 1) > width


def say(text: str, style: str | None = None) -> None:
    """Prints one paragraph of plain text, wrapped in a terminal; `style` (a rich style) shows in a terminal only."""
    console().print(text, style=style)


def tell(text: str) -> None:
    """Prints one paragraph on stderr: what belongs beside the answer, not into a file made of it."""
    console(stderr=True).print(text)


def leave(text: str, code: int) -> NoReturn:
    """Ends a command that did its work and whose answer is no: one sentence on stderr and the exit code."""
    click.echo(f"rlk-ledger: {text}", err=True)
    raise click.exceptions.Exit(code)


def count(number: int, noun: str) -> str:
    """`1 receipt`, `2 receipts`, `3,000 processes`."""
    plural = noun + ("es" if noun.endswith("s") else "s")
    return f"{number:,} {noun if number == 1 else plural}"


@contextlib.contextmanager
def progress(what: str) -> Iterator[Callable[[int, int], None]]:
    """A progress bar over bytes on stderr, drawn in a terminal only; yields its `(done, total)` callback."""
    if not sys.stderr.isatty():
        yield lambda done, total: None
        return
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn(what), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


@contextlib.contextmanager
def working(what: str) -> Iterator[None]:
    """A spinner on stderr beside work whose length is not known, drawn in a terminal only."""
    if not sys.stderr.isatty():
        yield
        return
    with console(stderr=True).status(what):
        yield


def size_text(count: int) -> str:
    """A byte count for people: `0 B`, `1.5 KB`, `2.0 GB` (powers of 1000)."""
    value = float(count)
    for unit in ("B", "KB", "MB", "GB"):
        if value < 1000:
            return f"{count} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} TB"
