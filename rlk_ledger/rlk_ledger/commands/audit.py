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
    means = f" - {first.meaning}" if first is not None and first.severity != "info" else ""
    terminal.say(f"{result.verdict}: {result.reason}{means}", style=_STYLE.get(result.verdict, "yellow"))
    terminal.say(f"how sure: {_sureness(result, first)}")
    terminal.say(f"compared: {_compared(summary)}")
    if first is not None and first.severity != "info":
        terminal.say(f"evidence: {_pairs({k: v for k, v in first.evidence.items() if not isinstance(v, dict)})}")
    terminal.say(f"next: {_next(run, result, first)}")
    for finding in result.findings[:_SHOWN]:
        terminal.say("")
        terminal.say(f"{_MARK[finding.severity]}: {finding.finding_id} - {finding.meaning}", style="bold")
        terminal.say(f"  where {_pairs(finding.where)}")
        told = finding is first and finding.severity != "info"
        evidence = {k: v for k, v in finding.evidence.items() if not told or isinstance(v, dict)}
        if _pairs(evidence):
            terminal.say(f"  evidence {_pairs(evidence)}")
        if not told:
            terminal.say(f"  next {finding.to_dict()['next_step']}")
    if len(result.findings) > _SHOWN:
        terminal.say(f"{len(result.findings) - _SHOWN} more findings; --json lists them all.")


def _next(run: str, result: "AuditResult", first: "Finding | None") -> str:
    """What to do about the verdict: a pass is for replay to judge further, anything else has its own step."""
    if result.verdict == "pass":
        return f"`rlk-ledger replay --run-id {run}{terminal.named_ledger()}` measures whether this drift is noise."
    if result.decision == "nothing_compared":
        return "record a training pass with the weights each sample was generated under: only those values compare."
    if result.decision == "drift.zero":
        first = next(f for f in result.findings if f.finding_id == "drift.zero")
    return str(first.to_dict()["next_step"]) if first is not None else "read the reason above."


def _sureness(result: "AuditResult", first: "Finding | None") -> str:
    """What kind of evidence the verdict rests on."""
    if result.decision == "nothing_compared":
        return "certain that nothing was compared; what a comparison would have shown is unknown"
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
    if first.finding_id in ("group.duplicates", "values.copied"):
        return "by the run's own numbers chance does this less than once in a million"
    if first.finding_id in ("values.defaulted", "values.impossible"):
        return "these values lie farther off than any drift this run shows elsewhere"
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

    return ", ".join(f"{key} {short(value)}" for key, value in plain(fields).items() if value not in (None, [], {}))


def short(value: Any) -> str:
    """A value on a line for people: four digits, five entries of a list, the head of a digest or a long name.

    Sentences stay whole.
    """
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, dict):
        return "{" + _pairs(value) + "}"
    if isinstance(value, list):
        shown = ", ".join(short(v) for v in value[:5])
        return f"[{shown}{', ...' if len(value) > 5 else ''}]"
    text = str(value)
    algorithm, colon, digest = text.partition(":")
    if colon and len(digest) >= 32 and all(c in "0123456789abcdef" for c in digest):
        return f"{algorithm}:{digest[:12]}..."
    return text if len(text) <= 80 or " " in text else text[:32] + "..."
