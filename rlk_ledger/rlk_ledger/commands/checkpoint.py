"""`checkpoint`, `anchor` and `keygen`: making what shows tampering, and keeping it where it cannot be reached."""

import base64
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rlk_ledger import terminal

if TYPE_CHECKING:
    from rlk_ledger.store import Store
    from rlk_ledger_schemas.checkpoints import Checkpoint


@click.command()
@click.argument("run", required=False)
@click.option(
    "-o",
    "--output",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Keep a copy of RUN's newest checkpoint here.",
)
@terminal.ledger_option
@terminal.output_options
def checkpoint(run: str | None, output: Path | None, url: str | None, as_json: bool) -> None:
    """Put everything shipped so far under one root, so that a change of it shows.

    Without RUN, in every run. A checkpoint is worth as much as the copies of it that lie where nobody can reach who can
    write the ledger: -o FILE, or `anchor`. A FILE that holds an older checkpoint is replaced only by one that follows
    it. RLK_SIGNING_KEY signs. Exit codes: 0; 1 FILE knows another history than the ledger; 2 a damaged ledger, usage.
    """
    from rlk_ledger.anchors import Conflict, keep
    from rlk_ledger.checkpoints import latest, make
    from rlk_ledger.signing import load_signer

    if output is not None and run is None:
        raise click.UsageError("--output keeps the checkpoint of one run: which RUN?")
    ledger = terminal.open_url(url)
    signer = load_signer()
    documents = []
    for name in [run] if run is not None else ledger.runs():
        ledger.run(name)
        with terminal.working(f"checkpoint {name}"):
            made = make(ledger.store, name, signer)
            newest = made or latest(ledger.store, name)
        documents.append(_document(ledger.store, name, newest, made is not None))
        if not as_json:
            _say(name, newest, made is not None)
        if output is not None and newest is not None:
            try:
                keep(ledger.store, name, newest, output)
            except Conflict as error:
                terminal.leave(str(error), 1)
    if as_json:
        terminal.echo_json({"ledger": ledger.url, "checkpoints": documents})
        return
    _say_what_to_do(run, output, bool(documents and any(d["k"] is not None for d in documents)), signer is not None)


def _document(store: "Store", run: str, newest: "Checkpoint | None", new: bool) -> dict[str, Any]:
    from rlk_ledger import layout

    if newest is None:
        return {"run_id": run, "k": None, "new": False}
    return {
        "run_id": run,
        "k": newest.k,
        "new": new,
        "object": store.locate(layout.checkpoint_path(run, newest.k)),
        "origin": newest.origin,
        "receipts": newest.size,
        "root": base64.b64encode(newest.root).decode(),
        "digest": newest.digest,
        "key": _vkey(newest),
    }


def _vkey(newest: "Checkpoint") -> str | None:
    """The key a checkpoint is signed with, under the name its signature bears."""
    from rlk_ledger_schemas.notes import VerifierKey, decode_base64

    if newest.info.public_key is None:
        return None
    return VerifierKey(newest.origin, decode_base64(newest.info.public_key)).encode()


def _say(run: str, newest: "Checkpoint | None", new: bool) -> None:
    if newest is None:
        terminal.say(f"run {run}: nothing was shipped yet, so there is nothing to cover")
        return
    added = f"{len(newest.leaves)} of them new" if new else "none of them new"
    receipts = terminal.count(newest.size, "receipt")
    signed = f"signed by {_vkey(newest)}" if newest.info.public_key else "not signed"
    terminal.say(f"run {run}: checkpoint {newest.k} covers {receipts}, {added}; {signed}")
    terminal.say(f"       root {base64.b64encode(newest.root).decode()}")


def _say_what_to_do(run: str | None, output: Path | None, any_: bool, signed: bool) -> None:
    if not any_:
        return
    name, where = run or "RUN", terminal.named_ledger()
    if output is not None:
        terminal.say(f"Copied to {output}. Keep it where nobody can reach who can write the ledger;")
        terminal.say(f"`rlk-ledger verify {name}{where} --checkpoint {output}` compares.")
    else:
        terminal.say("Keep a copy where nobody can reach who can write the ledger:")
        terminal.say(
            f"`rlk-ledger checkpoint {name}{where} -o FILE` or `rlk-ledger anchor {name}{where} --to URL`; "
            f"`rlk-ledger verify {name}{where} --checkpoint FILE` compares."
        )
    if not signed:
        terminal.say("It is not signed: `rlk-ledger keygen PATH` makes a key, RLK_SIGNING_KEY=PATH signs with it.")


@click.command()
@click.argument("run")
@click.option("--to", metavar="URL", required=True, envvar="RLK_ANCHOR", help="Where copies are kept: a path or a URL.")
@terminal.ledger_option
@terminal.output_options
def anchor(run: str, to: str, url: str | None, as_json: bool) -> None:
    """Copy a run's newest checkpoint to a second place, which others own.

    What lies there is never replaced, and is compared first. Exit codes: 0; 1 the anchor knows another history than the
    ledger, or a later one than the ledger still has; 2 usage, or a run without a checkpoint.
    """
    from rlk_ledger.anchors import Conflict
    from rlk_ledger.anchors import anchor as put

    ledger = terminal.open_url(url)
    ledger.run(run)
    try:
        with terminal.working(f"anchor {run}"):
            done = put(ledger.store, run, to)
    except Conflict as error:
        terminal.leave(f"{error} `rlk-ledger verify {run}{terminal.named_ledger()} --anchor {to}` says more.", 1)
    if as_json:
        document = _document(ledger.store, run, done.checkpoint, done.written)
        terminal.echo_json({"ledger": ledger.url, "anchor": done.where, **document})
        return
    size = terminal.count(done.checkpoint.size, "receipt")
    what = "is at" if done.written else "was already at"
    terminal.say(f"checkpoint {done.checkpoint.k} of run {run} ({size}) {what} {done.where}")
    terminal.say(f"`rlk-ledger verify {run}{terminal.named_ledger()} --anchor {to}` compares.")


@click.command()
@click.argument("path", type=click.Path(path_type=Path))
@click.option("--public", is_flag=True, help="Print the public key of the key that is at PATH; make none.")
@terminal.output_options
def keygen(path: Path, public: bool, as_json: bool) -> None:
    """Make a key that signs receipts and checkpoints.

    Writes an Ed25519 private key to PATH (PEM, readable by its owner only) and prints the public key, one line on
    stdout, which `verify --key` takes, also as a file. An existing file is never overwritten.
    """
    from rlk_ledger.signing import load_signer, new_key

    signer = load_signer(str(path)) if public else new_key(path)
    assert signer is not None  # a path was given
    if as_json:
        terminal.echo_json({"path": str(path.absolute()), "key": signer.vkey()})
        return
    click.echo(signer.vkey())  # not wrapped: it is to be copied, or sent to a file
    if not public:
        where = path.absolute()
        terminal.tell(
            f"The private key is in {path}: RLK_SIGNING_KEY={where} signs with it. Who has it can sign as you."
        )
        terminal.tell("Give the line above to whoever verifies: `rlk-ledger verify --key LINE`.")
