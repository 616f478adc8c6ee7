"""`rlk-ledger explain`: say which variant of the reference one side's values follow."""

from __future__ import annotations

from contextlib import nullcontext
from typing import cast

import click

from rlk_ledger import terminal
from rlk_ledger_replay.semantics import SIDES, Side


@click.command()
@click.argument("run")
@click.option("--side", type=click.Choice(SIDES), required=True, help="The side to imitate.")
@terminal.ledger_option
@click.option("--samples", type=click.IntRange(min=1), default=64, show_default=True, help="How many samples to score.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Seed of choice and splits.")
@click.option("--weights", metavar="TEMPLATE", help="Where checkpoints are, with {version} in it.")
@click.option("--threads", type=click.IntRange(min=1), default=1, show_default=True, help="Threads of the reference.")
@click.option("--factors", "with_factors", is_flag=True, help="Explain both sides and give a verdict on every factor.")
@click.option("--no-record", is_flag=True, help="Do not write the answer into the ledger.")
@terminal.output_options
@click.pass_context
def explain(
    ctx: click.Context,
    run: str,
    side: str,
    url: str | None,
    samples: int,
    seed: int,
    weights: str | None,
    threads: int,
    with_factors: bool,
    no_record: bool,
    as_json: bool,
) -> None:
    """Imitate one side of a run and say what its values follow.

    The reference is scored as the side declares, under eight other orders of the same sums, and under every variant of
    the arithmetic; a variant is named only when it explains the excess on groups it was not fitted on. Exit codes: 0
    answered, 1 the reference is broken or a variant did not apply, 3 something could not be known, 2 usage.
    """
    from rlk_ledger_replay import screen
    from rlk_ledger_replay.explain.run import explain_side, load
    from rlk_ledger_replay.explain.screen import show
    from rlk_ledger_replay.factors.run import judge_factors
    from rlk_ledger_replay.factors.screen import show_factors
    from rlk_ledger_replay.preparation import Request
    from rlk_ledger_replay.run import Silent

    ledger = terminal.open_url(url)
    request = Request(samples=samples, seed=seed, weights=weights, threads=threads)
    bar = None if as_json else screen.Bar()
    with bar or nullcontext():
        progress = bar or Silent()
        material = load(ledger, run, request, progress)
        found = {one: explain_side(material, one, progress, keep=not no_record) for one in _sides(side, with_factors)}
        verdicts = judge_factors(found, material, keep=not no_record) if with_factors else ()
    chosen = found[cast(Side, side)]
    if as_json:
        terminal.echo_json({**chosen.to_dict(), "factor_verdicts": [one.to_dict() for one in verdicts]})
    else:
        show(chosen, terminal.console())
        if with_factors:
            show_factors(verdicts, terminal.console())
    ctx.exit(chosen.exit_code)


def _sides(side: str, both: bool) -> tuple[Side, ...]:
    return SIDES if both else (cast(Side, side),)
