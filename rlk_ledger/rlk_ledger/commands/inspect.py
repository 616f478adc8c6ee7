"""`runs` and `show`: what is in a ledger."""

from typing import TYPE_CHECKING, Any

import click

from rlk_ledger import terminal
from rlk_ledger_schemas.errors import LedgerError

if TYPE_CHECKING:
    from rlk_ledger.ledger import Ledger


@click.command()
@terminal.ledger_option
@terminal.output_options
@click.pass_context
def runs(ctx: click.Context, url: str | None, as_json: bool) -> None:
    """List the runs of a ledger: roles, writers, steps, events, gaps.

    Exit codes: 0, or 1 when a run is damaged; the others are listed all the same.
    """
    ledger = terminal.open_url(url)
    found = [_overview(ledger, run_id) for run_id in ledger.runs()]
    damaged = [r for r in found if "error" in r]
    if as_json:
        terminal.echo_json({"ledger": ledger.url, "ledger_id": ledger.info.ledger_id, "runs": found})
        ctx.exit(1 if damaged else 0)
    if not found:
        terminal.say(f"{ledger.url} holds no runs yet.")
        return
    headers = ("run", "roles", "writers", "steps", "events", "size", "state")
    rows = [
        (r["run_id"], "", "", "", "", "", "damaged")
        if "error" in r
        else (r["run_id"], _roles(r), r["writers"], _steps(r), r["events"], terminal.size_text(r["bytes"]), _state(r))
        for r in found
    ]
    terminal.table(headers, rows, right=("writers", "events", "size"))
    for run in damaged:
        terminal.say(run["error"])
    ctx.exit(1 if damaged else 0)


def _overview(ledger: "Ledger", run_id: str) -> dict[str, Any]:
    """The run at a glance, or `error`: one damaged run must not hide the others."""
    from rlk_ledger.summary import overview

    try:
        return overview(ledger.run(run_id))
    except LedgerError as error:
        return {"run_id": run_id, "error": str(error)}


@click.command()
@click.argument("run")
@terminal.ledger_option
@terminal.output_options
def show(run: str, url: str | None, as_json: bool) -> None:
    """Show one run: its writers, event types, tokens and gaps."""
    from rlk_ledger.summary import detail

    ledger = terminal.open_url(url)
    found = detail(ledger, run)
    if as_json:
        terminal.echo_json(found)
        return
    terminal.say(f"run {found['run_id']} of ledger {found['ledger_id'][:8]} at {found['ledger']}", style="bold")
    terminal.say(
        f"roles {_roles(found)}; steps {_steps(found)}; {_count(found, 'events')} in {_count(found, 'segments')} "
        f"({terminal.size_text(found['bytes'])}); {found['tokens']} response tokens, "
        f"{found['active_tokens']} in the loss; redaction {found['redaction']}; {_state(found)}"
    )
    if found["pruned"] is not None:
        terminal.say(f"{found['pruned']['text']}; writers and types below count them, tokens do not.")
    writers = [w for w in found["writer_list"] if not w["shipper"]]
    terminal.table(
        ("writer", "role", "rank", "engine", "events", "state"),
        [(w["writer_id"][:8], w.get("role"), w.get("rank"), w.get("engine"), w["events"], _ending(w)) for w in writers],
        right=("rank", "events"),
    )
    terminal.table(
        ("type", "events", "steps"), [(t["type"], t["count"], _steps(t)) for t in found["types"]], right=("events",)
    )


def _count(found: dict[str, Any], name: str) -> str:
    return f"{found[name]} {name.removesuffix('s') if found[name] == 1 else name}"


def _roles(run: dict[str, Any]) -> str:
    return ", ".join(f"{role} x{size}" for role, size in run["roles"].items()) or "not declared"


def _steps(item: dict[str, Any]) -> str:
    first, last = item["first_step"], item["last_step"]
    return "-" if first is None else str(first) if first == last else f"{first}-{last}"


def _state(run: dict[str, Any]) -> str:
    parts = [f"{run['open']} open" if run["open"] else "closed"]
    if run["killed"]:
        parts.append(f"{run['killed']} killed")
    if run["dropped"]:
        parts.append(f"{run['dropped']} events dropped")
    if run["lost_bytes"]:
        parts.append(f"{run['lost_bytes']} bytes lost")
    if run["pruned_segments"]:
        parts.append(f"{run['pruned_segments']} of {run['segments']} segments pruned")
    if run["holds"]:
        parts.append("held")
    if run["sealed"]:
        parts.append("sealed" if run["sealed"] == "complete" else "sealed incomplete")
    return ", ".join(parts)


def _ending(writer: dict[str, Any]) -> str:
    extra = [f"{writer['dropped']} dropped"] if writer["dropped"] else []
    extra += [f"{writer['lost_bytes']} bytes lost"] if writer["lost_bytes"] else []
    return ", ".join([writer["state"], *extra])
