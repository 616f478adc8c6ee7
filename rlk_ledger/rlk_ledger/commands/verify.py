"""`verify`: is the ledger intact?"""

import itertools
from typing import TYPE_CHECKING

import click

from rlk_ledger import terminal

if TYPE_CHECKING:
    from rlk_ledger.verify import Finding, VerifyResult

_STYLES = {"error": "bold red", "gap": "yellow", "info": "dim"}
_WORDS = {"error": "ERROR", "gap": "GAP", "info": "note"}
_SHOWN = 3


@click.command()
@click.argument("run", required=False)
@click.option("--deep", is_flag=True, help="Recompute every event's leaf and every column.")
@click.option("--checkpoint", "copies", multiple=True, metavar="FILE", help="A copy of a checkpoint, kept elsewhere.")
@click.option("--anchor", metavar="URL", envvar="RLK_ANCHOR", help="Where `anchor` put copies.")
@click.option("--key", "keys", multiple=True, metavar="VKEY|FILE", help="Believe checkpoints of this key only.")
@terminal.ledger_option
@terminal.output_options
@click.pass_context
def verify(
    ctx: click.Context,
    run: str | None,
    deep: bool,
    copies: tuple[str, ...],
    anchor: str | None,
    keys: tuple[str, ...],
    url: str | None,
    as_json: bool,
) -> None:
    """Check that nothing in the ledger was changed, removed or lost.

    What a checkpoint covers cannot be changed or removed unseen; who can write the bucket can replace checkpoints too,
    which copies kept elsewhere (--checkpoint, --anchor) and keys (--key) show.

    Exit codes: 0 intact (open writers, duplicates and killed writers recovered without loss are named and fine);
    1 tampered or corrupt; 2 usage; 3 intact but incomplete: bytes, sequence numbers or ranks are missing.
    """
    from rlk_ledger.verify import verify as check

    with terminal.progress("verify") as progress:
        result = check(terminal.require_url(url), run, deep, progress, checkpoints=copies, keys=keys, anchor=anchor)
    if as_json:
        terminal.echo_json({"ledger": url, "run_id": run, **{f: getattr(result, f) for f in result.__struct_fields__}})
    else:
        for like, items in itertools.groupby(result.findings, key=lambda f: (f.kind, f.object, f.writer)):
            _say_alike(like[0], list(items))
        style = {"intact": "bold green", "tampered": "bold red", "incomplete": "bold yellow"}[result.verdict]
        what = "every event and column" if deep else "every receipt and file"
        segments = _count(result.segments, "segment")
        segments += f" ({result.pruned} of them pruned)" if result.pruned else ""
        terminal.say(
            f"{result.verdict}: checked {what} of {_count(result.runs, 'run')}, {segments}, "
            f"{_count(result.events, 'event')}, {terminal.size_text(result.bytes)}",
            style,
        )
        _say_covered(result)
    ctx.exit(int(result.exit_code))


def _say_alike(kind: str, items: "list[Finding]") -> None:
    """Prints findings of one kind about one writer or object: the first few in full, the rest as a count."""
    for item in items[:_SHOWN]:
        terminal.say(f"{_WORDS[item.severity]}  {kind}  {item.object}{_place(item)}", _STYLES[item.severity])
        terminal.say(f"       {item.text}")
    if len(items) > _SHOWN:
        terminal.say(f"       and {len(items) - _SHOWN} more {kind} of the same; --json lists them all")


def _say_covered(result: "VerifyResult") -> None:
    """How much is covered, and what to do about the rest."""
    bare = [c for c in result.checkpoints if c.k is None and c.uncovered]
    some = [c for c in result.checkpoints if c.k is not None]
    receipts = sum(c.receipts for c in some)
    if some:
        behind = f", {_count(sum(c.signed for c in some), 'receipt')} after them bear a registered signature"
        behind = behind if any(c.signed for c in some) else ""
        terminal.say(
            f"covered by checkpoints of {_count(len(some), 'run')}: {_count(receipts, 'receipt')}{behind}", "dim"
        )
    if bare:
        which = bare[0].run_id if len(bare) == 1 else f"{len(bare)} runs"
        what = "what is cut from the end of a chain cannot be seen there"
        terminal.say(f"no checkpoint covers {which}: {what}; `rlk-ledger checkpoint` makes them", "dim")


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _place(item: "Finding") -> str:
    out = f"  writer {item.writer}" if item.writer else ""
    if item.first is not None:
        out += f" events {item.first}-{item.last}" if item.last != item.first else f" event {item.first}"
    if item.byte is not None:
        out += f"  bytes {item.byte}-{item.end_byte - 1}" if item.end_byte else f"  byte {item.byte}"
    return out
