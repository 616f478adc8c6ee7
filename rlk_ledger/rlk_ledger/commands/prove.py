"""`prove` and `seal`: evidence to take along, and the end of a run."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from rlk_ledger import terminal

if TYPE_CHECKING:
    from rlk_ledger.ledger import Ledger, Run
    from rlk_ledger.prove import Bundle, EventName
    from rlk_ledger.seals import Sealed
    from rlk_ledger_schemas.checkpoints import Checkpoint

_LISTED = 20
_DEFAULT_TYPE = "rollout.sample"


@click.command()
@click.argument("event")
@click.option("--sample", metavar="ID", help="Take the event of this sample; EVENT is then the run alone.")
@click.option(
    "--type",
    "type_name",
    metavar="TYPE",
    help="Of the sample's events the one of this type (rollout.sample when not given).",
)
@click.option(
    "-o", "--output", type=click.Path(path_type=Path, dir_okay=False), help="Where the bundle goes, not stdout."
)
@click.option("--no-arrays", is_flag=True, help="Bundle the arrays' digests, not the arrays.")
@click.option(
    "--since",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="An older checkpoint, kept elsewhere: prove also that the newest continues it.",
)
@click.option("--checkpoint-now", is_flag=True, help="Make a checkpoint first where none covers the event yet.")
@terminal.ledger_option
@terminal.output_options
def prove(
    event: str,
    sample: str | None,
    type_name: str | None,
    output: Path | None,
    no_arrays: bool,
    since: Path | None,
    checkpoint_now: bool,
    url: str | None,
    as_json: bool,
) -> None:
    """Export the proof that an event is under the run's newest checkpoint.

    EVENT is RUN/WRITER/NUMBER, as `show` and the views name them (a writer id may be cut to what is unique), or a run
    with --sample. The bundle is one JSON document; tools/check_proof.py checks it anywhere, with nothing but Python.

    Exit codes: 0 proved; 1 the ledger does not continue the checkpoint given with --since; 2 no such event, or a
    damaged ledger; 3 no checkpoint covers the event yet.
    """
    from rlk_ledger.prove import Diverged, NotCovered, encode_bundle

    ledger = terminal.open_url(url)
    name = _name(ledger, event, sample, type_name)
    kept = _kept(since)
    try:
        with terminal.working(f"prove {name}"):
            bundle = _proved(ledger, name, checkpoint_now, arrays=not no_arrays, since=kept)
    except NotCovered as error:
        how = f"`rlk-ledger checkpoint {name.run_id}{terminal.named_ledger()}` covers it, or --checkpoint-now."
        terminal.leave(f"{error} {how}", 3)
    except Diverged as error:
        terminal.leave(str(error), 1)
    if output is None:
        click.echo(encode_bundle(bundle), nl=False)
        return
    _write(output, encode_bundle(bundle))
    if as_json:
        named = {"run_id": name.run_id, "writer_id": bundle.writer_id, "seq": bundle.seq}
        proved = {"bundle": str(output), "receipt": bundle.log.index, "whole": bundle.event is not None}
        terminal.echo_json({"ledger": ledger.url, **named, **proved})
        return
    what = "" if bundle.event is not None else " (its segment is gone: only the receipt that names it is proved)"
    terminal.say(f"event {bundle.seq} of writer {bundle.writer_id} is under the newest checkpoint{what}: {output}")
    terminal.say(f"check it anywhere: python -I -S check_proof.py {output}")


def _proved(ledger: "Ledger", name: "EventName", now: bool, arrays: bool, since: "Checkpoint | None") -> "Bundle":
    from rlk_ledger.prove import NotCovered, prove

    try:
        return prove(ledger.run(name.run_id), name.writer_id, name.seq, arrays=arrays, since=since)
    except NotCovered:
        if not now:
            raise
    from rlk_ledger.checkpoints import make
    from rlk_ledger.signing import load_signer

    make(ledger.store, name.run_id, load_signer())
    ledger.forget(name.run_id)
    return prove(ledger.run(name.run_id), name.writer_id, name.seq, arrays=arrays, since=since)


def _name(ledger: "Ledger", event: str, sample: str | None, type_name: str | None) -> "EventName":
    from rlk_ledger.prove import parse_event

    if sample is None:
        if type_name is not None:
            raise click.UsageError("--type goes with --sample.")
        return parse_event(event)
    return _of_sample(ledger.run(event), sample, type_name)


def _of_sample(run: "Run", sample: str, type_name: str | None) -> "EventName":
    """The one event of a sample that is meant; raises click.UsageError when there is none or more than one."""
    from rlk_ledger.prove import find_sample

    found = list(find_sample(run, sample))
    wanted = type_name or _DEFAULT_TYPE
    named = [name for name, kind in found if kind == wanted]
    if len(named) == 1:
        return named[0]
    if not found:
        raise click.UsageError(f"run {run.run_id} holds no event of sample {sample!r}.")
    shown = [(name, kind) for name, kind in found if not named or kind == wanted]
    lines = "".join(f"\n  {name}  {kind}" for name, kind in shown[:_LISTED])
    more = f"\n  and {len(shown) - _LISTED} more" if len(shown) > _LISTED else ""
    count = f"{len(named)} events" if named else "no event"
    raise click.UsageError(f"sample {sample!r} has {count} of type {wanted}; name one of these:{lines}{more}")


def _kept(path: Path | None) -> "Checkpoint | None":
    from rlk_ledger_schemas.checkpoints import decode_checkpoint
    from rlk_ledger_schemas.errors import FormatError

    if path is None:
        return None
    try:
        return decode_checkpoint(path.read_bytes(), str(path))
    except (OSError, FormatError) as error:
        raise click.UsageError(f"--since: {error}") from None


def _write(path: Path, data: bytes) -> None:
    try:
        path.write_bytes(data)
    except OSError as error:
        raise click.UsageError(f"cannot write {path}: {error.strerror}.") from None


@click.command()
@click.argument("run")
@click.option(
    "--incomplete", is_flag=True, help="Seal it although ranks are missing or writers are open; the seal says so."
)
@terminal.ledger_option
@terminal.output_options
@click.pass_context
def seal(ctx: click.Context, run: str, incomplete: bool, url: str | None, as_json: bool) -> None:
    """Close a run: a checkpoint, and over it who was to take part and who did.

    A run is sealed once; sealing it again shows the seal. What a shipper still holds is shipped all the same, and
    `verify` says what came after the seal. With RLK_SIGNING_KEY the seal and its checkpoint are signed.

    Exit codes: 0 sealed; 2 the ledger is damaged or the run has no receipts; 3 not sealed, as ranks are missing or
    writers are open, or sealed --incomplete.
    """
    from rlk_ledger.seals import Unfinished
    from rlk_ledger.seals import seal as make
    from rlk_ledger.signing import load_signer

    ledger = terminal.open_url(url)
    ledger.run(run)
    try:
        with terminal.working(f"seal {run}"):
            sealed = make(ledger.store, run, incomplete=incomplete, signer=load_signer())
    except Unfinished as error:
        terminal.leave(f"{error} --incomplete seals it all the same.", 3)
    if as_json:
        terminal.echo_json({"ledger": ledger.url, "mine": sealed.mine, **msgspec.to_builtins(sealed.seal)})
    else:
        _say(run, sealed)
    ctx.exit(0 if sealed.seal.complete else 3)


def _say(run: str, sealed: "Sealed") -> None:
    found = sealed.seal
    how = "is sealed" if sealed.mine else "was sealed before"
    state = "complete" if found.complete else "INCOMPLETE"
    signed = "signed" if found.signature else "unsigned"
    at = f"checkpoint {found.checkpoint.k}, {terminal.count(found.checkpoint.size, 'receipt')}"
    terminal.say(f"run {run} {how}, {state}, {signed}, on {at} with root {found.checkpoint.root}")
    rows = [_row(role, found.missing, count) for role, count in found.roster.items()]
    terminal.table(
        ("role", "ranks", "opened", "closed", "killed", "never reported"),
        rows,
        right=("ranks", "opened", "closed", "killed"),
    )
    if found.open:
        were = f"{terminal.count(len(found.open), 'writer')} {'was' if len(found.open) == 1 else 'were'} open"
        terminal.say(f"{were}: {', '.join(writer[:8] for writer in found.open[:_LISTED])}")


def _row(role: str, missing: dict[str, Any], count: Any) -> tuple[Any, ...]:
    from rlk_ledger.seals import spans_text

    absent = f"rank {spans_text(missing[role])}" if role in missing else ""
    return role, count.expected, count.opened, count.closed, count.dead, absent
