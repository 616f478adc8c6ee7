"""`divergence`: the first boundary of a forward pass at which two captured passes stop agreeing."""

from typing import TYPE_CHECKING, Any

import click

from rlk_ledger import terminal
from rlk_ledger_schemas.errors import UsageError

if TYPE_CHECKING:
    from rlk_ledger.boundaries import Pass
    from rlk_ledger.divergence import Compared, Divergence

_TYPES = frozenset({"boundary.captured", "batch.layout", "writer.opened", "run.opened"})


@click.command()
@click.argument("run")
@click.option("--left", default="rollout", show_default=True, metavar="ROLE[:PASS]", help="One side's pass.")
@click.option("--right", default="training", show_default=True, metavar="ROLE[:PASS]", help="The other side's pass.")
@click.option("--placebo", metavar="ROLE:PASS", multiple=True, help="A pass of one side in another layout; repeatable.")
@click.option("--head-dim", type=click.IntRange(min=1), help="Columns of a head, where q, k and v are fused by head.")
@terminal.ledger_option
@terminal.output_options
def divergence(
    run: str,
    left: str,
    right: str,
    placebo: tuple[str, ...],
    head_dim: int | None,
    url: str | None,
    as_json: bool,
) -> int:
    """Name the first boundary of a forward pass at which two captured passes differ.

    Passes are those `boundary.captured` recorded. A pass of the same side that holds the same samples in another
    layout gives each boundary its noise floor; without one every differing bit counts. Exit codes: 0 every captured
    boundary agreed, 1 one differs beyond its floor (or replicas do), 3 some could not be compared or the engines are
    two (what differs first is then a lead), 2 nothing to compare.
    """
    from rlk_ledger.boundaries import read_passes
    from rlk_ledger.divergence import compare_passes, placebos
    from rlk_ledger.history import History

    ledger = terminal.open_url(url)
    with terminal.working(f"reading {run}"):
        passes = read_passes(History.from_events(ledger.read_events(run, _TYPES), run))
    pairs = _pairs(passes, left, right)
    extra = [_named(passes, name) for name in placebo]
    results = []
    for one, other in pairs:
        own = [(s, p) for s in (one, other) for p in extra if p.place.role == s.place.role and p is not s]
        noise = own or [pair for s in (one, other) for pair in placebos(passes, s)]
        results.append(compare_passes(one, other, noise, head_dim=head_dim))
    worst = next((r for r in results if r.exit_code == 1), None) or max(results, key=lambda r: r.exit_code)
    if as_json:
        terminal.echo_json({"run_id": run, "exit_code": worst.exit_code, "passes": [document(r) for r in results]})
    else:
        _print(worst, len(results))
    return worst.exit_code


def _pairs(passes: list["Pass"], left: str, right: str) -> list[tuple["Pass", "Pass"]]:
    """The passes to compare: those named, else those both sides gave one name, else each side's only one."""
    if not passes:
        raise UsageError(
            "no boundary was captured in this run; `capture_boundaries(model, OPERATORS, tensors=True)` records them."
        )
    sides = [_matching(passes, text) for text in (left, right)]
    if ":" not in left and ":" not in right:
        named = {(p.place.pass_id, p.place.dp): p for p in sides[1]}
        both = [(p, named[p.place.pass_id, p.place.dp]) for p in sides[0] if (p.place.pass_id, p.place.dp) in named]
        both = [(a, b) for a, b in both if a is not b]
        if both:
            return both
    if len(sides[0]) == len(sides[1]) == 1 and sides[0][0] is not sides[1][0]:
        return [(sides[0][0], sides[1][0])]
    raise UsageError(f"several passes could be meant; name two with --left and --right: {_listing(passes)}.")


def _matching(passes: list["Pass"], text: str) -> list["Pass"]:
    role, _, name = text.partition(":")
    found = [p for p in passes if p.place.role == role and (not name or p.place.pass_id == name)]
    if not found:
        raise UsageError(f"no pass {text!r} was captured; there are {_listing(passes)}.")
    return found


def _named(passes: list["Pass"], text: str) -> "Pass":
    found = _matching(passes, text)
    if len(found) > 1:
        raise UsageError(f"{text!r} is not one pass; there are {_listing(found)}.")
    return found[0]


def _listing(passes: list["Pass"]) -> str:
    return ", ".join(f"{p.place.role}:{p.place.pass_id}" for p in passes[:12])


def document(result: "Divergence") -> dict[str, Any]:
    """One comparison as plain values with stable keys."""
    return {
        "left": result.left.place._asdict(),
        "right": result.right.place._asdict(),
        "exit_code": result.exit_code,
        "first": None if result.first is None else result.first.to_dict(),
        "first_in_bits": None if result.first_bits is None else result.first_bits.part.text,
        "anchor": None if result.anchor is None else result.anchor.text,
        "suspects": [p.text for p in result.suspects],
        "floor_measured": result.floors,
        "one_engine": result.one_engine,
        "replicas_differ": [
            {**r.place._asdict(), "boundary": r.boundary, "stage": r.stage, "writers": list(r.writers)}
            for r in result.replicas
        ],
        "unmapped": result.unmapped,
        "boundaries": [c.to_dict() for c in result.compared],
    }


def _print(result: "Divergence", count: int) -> None:
    terminal.say(
        _headline(result), style="bold red" if result.exit_code == 1 else "yellow" if result.exit_code else "green"
    )
    between = f"{_name(result.left)} against {_name(result.right)}"
    terminal.say(
        f"compared: {between}{f', the worst of {count} pairs of passes' if count > 1 else ''}; {_counts(result)}"
    )
    if result.first is not None:
        terminal.say(f"evidence: {_evidence(result.first)}; its inputs: {_INPUTS[result.first.inputs]}")
        anchor = result.anchor.text if result.anchor is not None else "nothing captured before it"
        terminal.say(f"last aligned: {anchor}")
        seen = {c.part for c in result.compared if c.status != "unknown"}
        told = [p.text if p in seen else f"{p.text} (not seen on both sides)" for p in result.suspects]
        terminal.say(f"suspects, in the order of the computation: {', '.join(told)}")
    elif result.first_bits is not None:
        terminal.say(f"first differing bit from equal inputs: {result.first_bits.part.text}, within its floor")
    for one in result.replicas:
        terminal.say(
            f"replicas.differ: {one.place.role}:{one.place.pass_id} {one.boundary} ({one.stage}), "
            f"writers {one.writers[0][:8]} and {one.writers[1][:8]}"
        )
    terminal.say(f"next: {_next(result)}")
    terminal.say("")
    terminal.table(
        ("boundary", "status", "rms", "floor", "inputs", "reason"),
        [(c.part.text, c.status, _size(c.rms), _size(c.floor), c.inputs, c.reason) for c in result.compared],
        right=("rms", "floor"),
    )
    filtered = sorted({name for c in result.compared for name in c.filtered})
    if filtered:
        terminal.say(f"filtered by proven correspondences: {', '.join(filtered)}")
    if result.unmapped:
        terminal.say(f"unknown, no correspondence names them: {', '.join(result.unmapped)}")


_INPUTS = {
    "equal": "equal bit for bit",
    "within_floor": "within their floor",
    "differ": "differ too",
    "unknown": "not seen on both sides",
}


def _headline(result: "Divergence") -> str:
    if result.first is not None and not result.one_engine:
        return (
            f"a lead, no proof: {result.first.part.text} - {result.first.reason}; "
            "the engines differ or have no name, and layouts do not measure what two implementations round differently"
        )
    if result.first is not None:
        return f"first divergence: {result.first.part.text} - {result.first.reason}"
    if result.replicas:
        return "replicas differ: ranks that must hold the same bits do not"
    if result.exit_code:
        return "no divergence among what could be compared, and some boundaries are unknown"
    return "no divergence: every captured boundary agrees" + (" within its floor" if result.floors else " bit for bit")


def _name(one: "Pass") -> str:
    return f"{one.place.role}:{one.place.pass_id}"


def _counts(result: "Divergence") -> str:
    states = [c.status for c in result.compared]
    return ", ".join(
        f"{states.count(s)} {s.replace('_', ' ')}" for s in ("equal", "within_floor", "differs", "unknown")
    )


def _evidence(item: "Compared") -> str:
    floor = "not measured" if item.floor is None else f"{item.floor:.3g}"
    return (
        f"{item.differing} of {item.elements} elements differ, rms {_size(item.rms)} (values {_size(item.scale)}), "
        f"max {_size(item.peak)}, floor {floor}, {item.dtype}"
    )


def _size(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"


def _next(result: "Divergence") -> str:
    if result.first is None and not result.replicas:
        return (
            "nothing to do"
            if result.exit_code == 0
            else "capture the unknown boundaries on both sides, with tensors=True"
        )
    if result.replicas:
        return "check the weights and collectives of the named ranks before anything else"
    if not result.one_engine and result.first is not None:
        return "run one engine's pass through the other's implementation of that part; equal results clear it"
    if not result.floors:
        return "capture one pass of each side in a second layout: without a floor noise and fault look alike"
    if len(result.suspects) > 1:
        return f"capture what was not seen between {result.anchor.text if result.anchor else 'the start'} and there"
    return "compare how the two sides compute this one part: dtype, rounding order, weights"
