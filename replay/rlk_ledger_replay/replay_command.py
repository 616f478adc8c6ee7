"""`rlk-ledger replay`: re-score recorded samples and say which side drifted."""

from __future__ import annotations

from contextlib import nullcontext
from typing import cast, get_args

import click

from rlk_ledger import terminal
from rlk_ledger_kernels.dtypes import DType
from rlk_ledger_replay.adapters import How
from rlk_ledger_replay.arms import ARMS, ArmName
from rlk_ledger_replay.executors.choice import Kind, Plan
from rlk_ledger_replay.scorers.engines import Live, parse_pythons, parse_scorers
from rlk_ledger_replay.selection import Method
from rlk_ledger_replay.semantics import SIDES, Side
from rlk_ledger_schemas.errors import UsageError


@click.command()
@click.argument("run", required=False)
@click.option("--run-id", help="The run to replay, when it is not given as RUN.")
@terminal.ledger_option
@click.option("--where", help='SQL condition over the `samples` view, such as "step = 3".')
@click.option("--samples", type=click.IntRange(min=1), default=64, show_default=True, help="How many samples to score.")
@click.option(
    "--select",
    "method",
    type=click.Choice(get_args(Method)),
    default="stratified",
    show_default=True,
    help="How they are chosen: over steps and groups, the worst drift, or all that match.",
)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Seed of choice and intervals.")
@click.option("--arms", default=",".join(ARMS), show_default=True, help="Arms to report, separated by commas.")
@click.option(
    "--weights",
    metavar="TEMPLATE",
    help="Where checkpoints are, with {version} in it; otherwise the recorded paths.",
)
@click.option(
    "--schedules",
    type=click.IntRange(min=4, max=10),
    default=4,
    show_default=True,
    help="Placebo schedules a noise floor is measured with.",
)
@click.option("--threads", type=click.IntRange(min=1), default=1, show_default=True, help="Threads of the reference.")
@click.option(
    "--scorer",
    "scorers",
    multiple=True,
    metavar="ENGINE[@SIDE]",
    help="Let a live engine stand in for its side: vllm (rollout), megatron, transformers (training). Repeatable.",
)
@click.option(
    "--scorer-python",
    "pythons",
    multiple=True,
    metavar="[ENGINE=]PATH",
    help="The Python interpreter that has the engine, where it is not this one; else RLK_SCORER_PYTHON.",
)
@click.option(
    "--scorer-timeout",
    type=click.FloatRange(min=0, min_open=True),
    default=600.0,
    show_default=True,
    help="Seconds one engine process may take; what it had not answered by then is an error attempt.",
)
@click.option("--scorer-tp", type=click.IntRange(min=1), help="Tensor-parallel ranks of megatron; else as recorded.")
@click.option(
    "--scorer-float32", is_flag=True, help="Run each engine in float32 too and compare its shares with the reference's."
)
@click.option("--adapter", metavar="TEMPLATE", help="Where low-rank adapters of PEFT are, with {version} in it.")
@click.option(
    "--adapter-as",
    "ways",
    multiple=True,
    metavar="SIDE=WAY",
    help="How a side applied them: merged or unmerged; else as recorded. Repeatable.",
)
@click.option(
    "--merge-dtype",
    type=click.Choice(get_args(DType)),
    help="What merged weights were rounded to; else the dtype of the base.",
)
@click.option(
    "--executor",
    type=click.Choice(get_args(Kind)),
    default="local",
    show_default=True,
    help="Who scores: processes of this machine, or Ray actors (on RAY_ADDRESS, else on a cluster started here).",
)
@click.option(
    "--workers",
    type=click.IntRange(min=1, max=1024),
    default=1,
    show_default=True,
    help="Over how many of them samples are dealt; the bits are the same.",
)
@click.option("--isolate", is_flag=True, help="Score in a process of its own, so that a crash there costs no replay.")
@click.option(
    "--deadline",
    type=click.FloatRange(min=0, min_open=True),
    help="Seconds a worker may take for one batch of samples; what takes longer is an error attempt.",
)
@click.option("--resume", is_flag=True, help="Use what earlier replays of this run scored before they ended.")
@click.option("--no-record", is_flag=True, help="Do not write the result into the ledger.")
@terminal.output_options
@click.pass_context
def replay(
    ctx: click.Context,
    run: str | None,
    run_id: str | None,
    url: str | None,
    where: str | None,
    samples: int,
    method: str,
    seed: int,
    arms: str,
    weights: str | None,
    schedules: int,
    threads: int,
    scorers: tuple[str, ...],
    pythons: tuple[str, ...],
    scorer_timeout: float,
    scorer_tp: int | None,
    scorer_float32: bool,
    adapter: str | None,
    ways: tuple[str, ...],
    merge_dtype: DType | None,
    executor: Kind,
    workers: int,
    isolate: bool,
    deadline: float | None,
    resume: bool,
    no_record: bool,
    as_json: bool,
) -> None:
    """Re-score recorded samples and name the side that drifted.

    The scorer is a deterministic float32 reference on the recorded checkpoints, or on those of --weights. With --scorer
    live engines score the same tokens, each in a process of its own: the drift is taken apart along the chain from
    training to rollout, and each side is compared with what its engine gives now. Exit codes: 0 nothing wrong, 1
    something is wrong (an error finding), 3 something could not be known, 2 usage.
    """
    from rlk_ledger_replay import screen
    from rlk_ledger_replay.attempts import attempts_folder
    from rlk_ledger_replay.preparation import Request
    from rlk_ledger_replay.run import replay as run_replay

    chosen = _chosen(run, run_id)
    wanted = parse_arms(arms)
    live = Live(parse_scorers(scorers), parse_pythons(pythons), scorer_timeout, scorer_float32, scorer_tp)
    ledger = terminal.open_url(url)
    plan = Plan(executor, workers, isolate, deadline)
    if deadline is not None and not plan.apart:
        raise UsageError("--deadline ends worker processes, and there are none; add --isolate or --workers 2.")
    request = Request(
        samples,
        seed,
        cast(Method, method),
        weights,
        schedules,
        threads,
        live,
        plan=plan,
        adapter=adapter,
        adapter_as=parse_ways(ways),
        merge_dtype=merge_dtype,
        attempts=attempts_folder(ledger.url, chosen),
        resume=resume,
    )
    bar = None if as_json else screen.Bar()
    with bar or nullcontext():
        result = run_replay(ledger, chosen, where=where, request=request, arms=wanted, progress=bar, keep=not no_record)
    if as_json:
        terminal.echo_json(result.to_dict())
    else:
        screen.show(result, ledger.url, terminal.console())
    ctx.exit(result.exit_code)


def _chosen(run: str | None, run_id: str | None) -> str:
    """The one run named as RUN or as --run-id; raises click.UsageError for none and for two different ones."""
    named = {name for name in (run, run_id) if name}
    if len(named) != 1:
        raise click.UsageError("which run? Name one, as RUN or as --run-id; `rlk-ledger runs` lists them.")
    return named.pop()


def parse_ways(texts: tuple[str, ...]) -> dict[Side, How]:
    """How each side applied its adapter, from `SIDE=WAY`; raises UsageError that lists the known ones."""
    ways: dict[Side, How] = {}
    for text in texts:
        side, _, way = text.partition("=")
        if side not in SIDES or way not in get_args(How) or side in ways:
            told = " or ".join(f"{one}={other}" for one in SIDES for other in get_args(How))
            raise UsageError(f"--adapter-as {text!r}: give {told}, one for a side.")
        ways[side] = cast(How, way)
    return ways


def parse_arms(text: str) -> tuple[ArmName, ...]:
    """The arms named in a comma-separated list; raises UsageError that lists the known ones."""
    names = [part.strip() for part in text.split(",") if part.strip()]
    unknown = [name for name in names if name not in ARMS]
    if unknown or not names:
        raise UsageError(
            f"--arms {text!r}: {', '.join(unknown) or 'nothing'} is no arm; choose from {', '.join(ARMS)}."
        )
    return tuple(name for name in ARMS if name in names)
