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
        _say_sum(result)
        _say_covered(result, bool(keys))
        _say_next(result)
    ctx.exit(int(result.exit_code))


def _say_alike(kind: str, items: "list[Finding]") -> None:
    """Prints findings of one kind about one writer or object: the first few in full, the rest as a count."""
    for item in items[:_SHOWN]:
        terminal.say(f"{_WORDS[item.severity]}  {kind}  {item.object}{_place(item)}", _STYLES[item.severity])
        terminal.say(f"       {item.text}")
    if len(items) > _SHOWN:
        terminal.say(f"       and {len(items) - _SHOWN} more {kind} of the same; --json lists them all")


def _say_sum(result: "VerifyResult") -> None:
    """The verdict, and what it is about."""
    style = {"intact": "bold green", "tampered": "bold red", "incomplete": "bold yellow"}[result.verdict]
    what = "every event and column" if result.deep else "every receipt and file"
    gone = len({f.object for f in result.findings if f.kind == "segment.missing"})
    notes = [f"{result.pruned} of them pruned"] * bool(result.pruned) + [f"{gone} of them missing"] * bool(gone)
    segments = terminal.count(result.segments, "segment") + (f" ({', '.join(notes)})" if notes else "")
    terminal.say(
        f"{result.verdict}: checked {what} of {terminal.count(result.runs, 'run')}, {segments}, "
        f"{terminal.count(result.events, 'event')}, {terminal.size_text(result.bytes)}",
        style,
    )


_SPOOLED = ("seqs.missing", "rank.missing")
"""What may still lie in a spool somewhere."""


def _say_next(result: "VerifyResult") -> None:
    """What to do about what was found, where there is something to do."""
    kinds = {f.kind for f in result.findings}
    errors = {f.kind for f in result.findings if f.severity == "error"}
    if errors and all(kind.startswith("index.") for kind in errors):
        terminal.say("next: nothing is lost; delete the named index files, which only make reading faster.")
    elif errors:
        terminal.say(
            "next: leave the ledger as it is, bring the named objects back from the store's versions or a backup, and "
            "verify again; only who can write there, or a failing disk, can have done this."
        )
    elif kinds & {*_SPOOLED}:
        terminal.say(
            "next: it may still lie in a spool: `rlk-ledger recover SPOOL` on each machine that recorded; where it "
            "does not, it is lost."
        )
    elif "prune.unvouched" in kinds:
        terminal.say(
            "next: if you pruned, take a new copy (`rlk-ledger checkpoint RUN -o FILE`), and set RLK_SIGNING_KEY for "
            "`prune`; if nobody did, somebody deleted."
        )


def _say_covered(result: "VerifyResult", keyed: bool) -> None:
    """How much is covered, by what, and what to do about the rest."""
    bare = [c for c in result.checkpoints if c.k is None and c.uncovered]
    some = [c for c in result.checkpoints if c.k is not None]
    receipts = sum(c.receipts for c in some)
    if some:
        later = sum(c.signed for c in some)
        behind = (
            f", {terminal.count(later, 'later receipt')} {'bears' if later == 1 else 'bear'} a registered signature"
        )
        signed = ", signed by a given key" if keyed else ""
        text = f"covered by checkpoints of {terminal.count(len(some), 'run')}{signed}"
        terminal.say(f"{text}: {terminal.count(receipts, 'receipt')}{behind if later else ''}", "dim")
    if bare:
        which = bare[0].run_id if len(bare) == 1 else f"{len(bare)} runs"
        what = "what is cut from the end of a chain cannot be seen there"
        terminal.say(f"no checkpoint covers {which}: {what}; `rlk-ledger checkpoint` makes them", "dim")
    if result.copies:
        copies = "1 copy" if result.copies == 1 else f"{result.copies:,} copies"
        terminal.say(f"compared with {copies} kept elsewhere{_agreed(result)}", "dim")


def _agreed(result: "VerifyResult") -> str:
    told = ("checkpoint.changed", "checkpoint.missing", "receipt.missing", "receipt.replaced", "ledger.changed")
    return (
        ""
        if any(f.kind in told for f in result.findings)
        else ", and nothing departs from " + ("it" if result.copies == 1 else "them")
    )


def _place(item: "Finding") -> str:
    out = f"  writer {item.writer}" if item.writer else ""
    if item.first is not None:
        out += f" events {item.first}-{item.last}" if item.last != item.first else f" event {item.first}"
    if item.byte is not None:
        out += f"  bytes {item.byte}-{item.end_byte - 1}" if item.end_byte else f"  byte {item.byte}"
    return out
