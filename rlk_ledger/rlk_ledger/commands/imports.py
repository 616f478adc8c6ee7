"""`import`: dumps of other frameworks into a ledger."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rlk_ledger import terminal

if TYPE_CHECKING:
    from rlk_ledger.importers.model import Batch
    from rlk_ledger.importers.writing import Written

_FORMATS = ("slime", "vime", "miles", "prime-rl", "nemo-rl")
_SHOWN = 10


@click.command("import")
@click.argument("dump_format", metavar="[" + "|".join(_FORMATS) + "]", type=click.Choice(_FORMATS))
@click.argument("path", type=click.Path(path_type=Path))
@click.option("--run-id", help="The run to import into; by default one named after the format and the files.")
@click.option(
    "--declare",
    metavar="[SIDE.]NAME=VALUE",
    multiple=True,
    help="What no dump says: a contract field (temperature=0.7, training.compute_dtype=bfloat16) or weight_version.",
)
@terminal.ledger_option
@terminal.output_options
@click.pass_context
def imports(
    ctx: click.Context,
    dump_format: str,
    path: Path,
    run_id: str | None,
    declare: tuple[str, ...],
    url: str | None,
    as_json: bool,
) -> None:
    """Import dumps of slime, vime, miles, prime-rl or NeMo-RL into a ledger.

    PATH is a file or a folder of any number of steps. Nothing in a file is ever run, and a file that is refused leaves
    nothing behind; importing the same files again adds nothing. Exit codes: 0; 1 the dumps contradict each other;
    2 a file is refused; 3 something is missing from them.
    """
    from rlk_ledger.importers import read
    from rlk_ledger.importers.declared import Declared
    from rlk_ledger.importers.writing import default_run_id, write
    from rlk_ledger_schemas.findings import exit_code
    from rlk_ledger_schemas.objects import check_run_id

    ledger = terminal.require_url(url)
    stated = Declared.parse(declare)
    if run_id is not None:
        check_run_id(run_id)
    with terminal.progress(f"reading {path.name}") as tick:
        batch = read(dump_format, path, tick)
    with terminal.progress("writing") as tick:
        written = write(ledger, run_id or default_run_id(batch), batch, stated, tick)
    code = int(exit_code(finding.severity for finding in batch.findings))
    if as_json:
        terminal.echo_json(_document(ledger, batch, written, code))
    else:
        _print(batch, written, bool(declare))
    ctx.exit(code)


def _document(ledger: str, batch: "Batch", written: "Written", code: int) -> dict[str, Any]:
    return {
        "run_id": written.run_id,
        "ledger": ledger,
        "format": batch.format,
        "files": [{"file": s.name, "sha256": s.sha256, "bytes": s.bytes} for s in batch.sources],
        "samples": written.samples,
        "logprobs": dict(written.scores),
        "already_there": written.present,
        "notes": batch.notes,
        "findings": [finding.to_dict() for finding in batch.findings],
        "exit_code": code,
    }


def _print(batch: "Batch", written: "Written", declared: bool) -> None:
    tokens = sum(len(sample.response) for sample in batch.samples)
    scores = ", ".join(f"{count} {source}" for source, count in written.scores.items()) or "no"
    size = terminal.size_text(sum(source.bytes for source in batch.sources))
    files = f"{len(batch.sources)} file{'s' if len(batch.sources) != 1 else ''} ({size})"
    if not written.samples and not written.scores:
        terminal.say(f"run {written.run_id} holds everything in these {files} already: nothing was added.")
    else:
        there = f"; {written.present} were there already" if written.present else ""
        terminal.say(
            f"imported {written.samples} samples ({tokens} response tokens) and {scores} log-probability events from "
            f"{files} into run {written.run_id}{there}",
            style="green",
        )
    if declared and written.present:
        terminal.say(
            "note: --declare states nothing of what is there already; import under another --run-id to state it."
        )
    for note in batch.notes:
        terminal.say(f"note: {note}")
    for finding in batch.findings[:_SHOWN]:
        where = ", ".join(f"{key} {value}" for key, value in finding.where.items() if value is not None)
        terminal.say(f"{finding.severity}: {finding.finding_id} - {finding.evidence.get('reason', finding.meaning)}")
        terminal.say(f"  where {where}")
        terminal.say(f"  next {finding.to_dict()['next_step']}")
    if len(batch.findings) > _SHOWN:
        terminal.say(f"{len(batch.findings) - _SHOWN} more findings; --json lists them all.")
    terminal.say(f"next: `rlk-ledger audit {written.run_id}{terminal.named_ledger()}` says what the values show.")
