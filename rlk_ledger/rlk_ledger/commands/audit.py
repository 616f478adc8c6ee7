"""`audit`: what a recorded run shows to be wrong or unknown, without a model."""

from typing import TYPE_CHECKING, Any

import click

from rlk_ledger import terminal

if TYPE_CHECKING:
    from rlk_ledger.audit.finding import AuditResult, Finding
    from rlk_ledger.ledger import Ledger

_STYLE = {"pass": "green", "fail": "bold red", "not_comparable": "bold red"}
_MARK = {"error": "error", "gap": "gap", "info": "note"}
_SHOWN = 20


@click.command()
@click.argument("run")
@click.option("--record", is_flag=True, help="Record the findings and the verdict as events of the run.")
@terminal.ledger_option
@terminal.output_options
def audit(run: str, record: bool, url: str | None, as_json: bool) -> int:
    """Name what is wrong with a run from its record alone: no model, no torch.

    Exit codes: 0 no error and no gap, 1 an error, 3 something could not be known, 2 the audit could not run. A pass
    does not judge how large drift may be: replay measures the noise floor for that.
    """
    from rlk_ledger.audit import audit as examine
    from rlk_ledger.history import load_history

    ledger = terminal.open_url(url)
    with terminal.progress(f"reading {run}") as tick:
        history = load_history(ledger, run, progress=tick)
    result = examine(history)
    if record:
        record_result(ledger, run, result)
    if as_json:
        terminal.echo_json(result.to_dict())
    else:
        _print(run, result)
    return result.exit_code


def record_result(ledger: "Ledger", run: str, result: "AuditResult") -> None:
    """Appends every finding and the verdict to the run, as events of a replay writer; raises StoreError."""
    from rlk_ledger.audit.finding import plain

    with ledger.writer(run, role="replay") as recorder:
        for finding in result.findings:
            recorder.record("finding.raised", subject="audit", **finding.to_dict())
        recorder.record(
            "verdict.reached",
            verdict=result.verdict,
            subject="audit",
            decision=result.decision,
            reason=result.reason,
            exit_code=result.exit_code,
            evidence=_finite(plain(result.summary)),
        )


def _finite(value: Any) -> Any:
    return {k: _finite(v) for k, v in value.items() if v is not None} if isinstance(value, dict) else value


def _print(run: str, result: "AuditResult") -> None:
    summary, first = result.summary, next(iter(result.findings), None)
    terminal.say(f"{result.verdict}: {result.reason}", style=_STYLE.get(result.verdict, "yellow"))
    terminal.say(f"how sure: {_sureness(result, first)}")
    terminal.say(f"compared: {_compared(summary)}")
    if first is not None and first.severity != "info":
        terminal.say(f"evidence: {_pairs(first.evidence)}")
        terminal.say(f"next: {first.to_dict()['next_step']}")
    else:
        terminal.say(f"next: `rlk-ledger replay --run-id {run}` measures whether this drift is noise.")
    for finding in result.findings[:_SHOWN]:
        terminal.say("")
        terminal.say(f"{_MARK[finding.severity]}: {finding.finding_id} - {finding.meaning}", style="bold")
        terminal.say(f"  where {_pairs(finding.where)}")
        if finding is not first or finding.severity == "info":
            terminal.say(f"  evidence {_pairs(finding.evidence)}")
            terminal.say(f"  next {finding.to_dict()['next_step']}")
    if len(result.findings) > _SHOWN:
        terminal.say(f"{len(result.findings) - _SHOWN} more findings; --json lists them all.")


def _sureness(result: "AuditResult", first: "Finding | None") -> str:
    """What kind of evidence the verdict rests on."""
    if first is None:
        return "nothing on record speaks against this run; the size of drift was not judged"
    if first.finding_id == "drift.split":
        evidence = first.evidence
        return (
            f"{evidence['ratio']:.1f} times the drift, adjusted p {evidence['p_adjusted']:.1e} over "
            f"{evidence['tests_tried']} tests, {evidence['samples_in_level']} samples"
        )
    if first.finding_id in ("alignment.shift", "sampling.support") or "measured_slope" in first.where:
        return "measured over the recorded values; the record says nothing about it itself"
    if first.severity == "gap":
        return "certain that something is missing; what it would have shown is unknown"
    if first.severity == "info":
        return "read directly from the record; the size of drift was not judged"
    return "certain: two recorded facts contradict each other, or a recorded value is no measurement"


def _compared(summary: dict[str, Any]) -> str:
    drift = summary["drift"]
    text = (
        f"{summary['compared_tokens']} of {summary['active_tokens']} active tokens, "
        f"{summary['paired_samples']} of {summary['samples']} samples"
    )
    if summary["off_policy_tokens"]:
        text += f", {summary['off_policy_tokens']} tokens off-policy beside them"
    if drift["status"] == "measured":
        values = drift["metrics"]
        text += (
            f"; |d| mean {values['abs_dlogp_mean']:.4g}, p99 {values['abs_dlogp_p99']:.4g}, "
            f"max {values['abs_dlogp_max']:.4g}, k3 {values['kl_k3']:.3g}"
        )
    return text


def _pairs(fields: dict[str, Any]) -> str:
    from rlk_ledger.audit.finding import plain

    return ", ".join(f"{key} {_short(value)}" for key, value in plain(fields).items() if value not in (None, [], {}))


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, dict):
        return "{" + _pairs(value) + "}"
    if isinstance(value, list):
        shown = ", ".join(_short(v) for v in value[:5])
        return f"[{shown}{', ...' if len(value) > 5 else ''}]"
    text = str(value)
    return text if len(text) <= 80 else text[:32] + "..."
