"""`rlk-ledger demo`: two engines record, then the record is verified, audited, replayed and reported."""

from __future__ import annotations

import importlib.util
import json
import shlex
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from rlk_ledger import terminal
from rlk_ledger_replay.demo.faults import FAULTS
from rlk_ledger_replay.demo.settings import LIMIT_STEPS
from rlk_ledger_schemas.errors import UsageError

if TYPE_CHECKING:
    from rlk_ledger_replay.demo.flow import Outcome
    from rlk_ledger_replay.demo.phases import Phases
    from rlk_ledger_replay.demo.settings import Settings

_NEEDED = ("torch", "transformers", "safetensors", "jinja2")
_DAMAGE = "import pathlib; p = pathlib.Path({path}); b = bytearray(p.read_bytes()); b[{at}] ^= 1; p.write_bytes(b)"


@click.command()
@click.option(
    "--dir",
    "directory",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("rlk-demo"),
    show_default=True,
    help="Where the ledger, the weights and the report go.",
)
@click.option("--fault", type=click.Choice(tuple(FAULTS)), help="Make one side really wrong.")
@click.option(
    "--steps", type=click.IntRange(1, LIMIT_STEPS), default=4, show_default=True, help="How many policy updates."
)
@click.option("--seed", type=click.IntRange(0, 2**31 - 1), default=0, show_default=True, help="Seed of the sampling.")
@terminal.output_options
@click.pass_context
def demo(ctx: click.Context, directory: Path, fault: str | None, steps: int, seed: int, as_json: bool) -> None:
    """Show it all on a small model: record, verify, audit, replay.

    The model ships with the package, generates in one process and is trained in another; nothing is downloaded.
    With --fault something goes really wrong. A report is written. Exit codes: 0 nothing wrong, 1 the fault is named,
    3 something could not be known, 2 usage.
    """
    from rlk_ledger_replay.demo.flow import prepare, run_demo
    from rlk_ledger_replay.demo.phases import Phases

    _check_packages()
    settings = prepare(directory, fault, steps, seed)
    phases = Phases(terminal.console(stderr=as_json))
    _introduce(settings, phases)
    outcome = run_demo(settings, phases)
    if as_json:
        terminal.echo_json(outcome.to_dict())
    else:
        _conclude(outcome, phases, directory)
    ctx.exit(outcome.exit_code)


def _check_packages() -> None:
    """Raises UsageError when a package the engines or the report import is not installed."""
    absent = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if absent:
        raise UsageError(f"the demo needs {', '.join(absent)}: pip install 'rlk-ledger[replay,report]'.")


def _introduce(settings: Settings, phases: Phases) -> None:
    wrong = "none" if settings.fault is None else f"{settings.fault}: {FAULTS[settings.fault].does}"
    phases.say(f"run {settings.run_id} in {settings.root}", "bold")
    phases.say(f"fault {wrong}")


def _conclude(outcome: Outcome, phases: Phases, directory: Path) -> None:
    from rlk_ledger_replay import screen

    total = sum(outcome.timings.values())
    phases.say(f"{'total':<8} {total:5.1f} s")
    phases.say()
    screen.show(outcome.result, str(directory / "ledger"), phases.console)
    phases.say()
    phases.say(f"Report: {outcome.report}", "bold")
    phases.say("Try:")
    for line in suggestions(outcome, directory):
        phases.say(f"  {line}")


def suggestions(outcome: Outcome, directory: Path) -> list[str]:
    """Commands worth trying next, ready to paste: query the drift, verify, damage one bit and verify again."""
    run_id = outcome.settings.run_id
    ledger = shlex.quote(str(directory / "ledger"))
    query = f"select step, count(*) tokens, avg(abs_dlogp) drift from tokens where run_id = '{run_id}' group by all"
    segment = max(
        (directory / "ledger" / "runs" / run_id / "segment").rglob("*.parquet"), key=lambda path: path.stat().st_size
    )
    damage = _DAMAGE.format(path=json.dumps(str(segment)), at=segment.stat().st_size // 2)
    program = _program()
    return [
        f'{program} query --ledger {ledger} "{query} order by step"',
        f"{program} verify {run_id} --deep --ledger {ledger}",
        f"python3 -c {shlex.quote(damage)}   # flips one bit; then verify again",
    ]


def _program() -> str:
    """How this shell can call rlk-ledger again: by name where it is on PATH, else as it was called."""
    return "rlk-ledger" if shutil.which("rlk-ledger") else shlex.quote(sys.argv[0])
