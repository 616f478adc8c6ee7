"""One replay from a run id to a verdict: verify, audit, prepare, score, judge, record."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from rlk_ledger.audit import AuditResult, audit
from rlk_ledger.audit.backends import deterministic_sides
from rlk_ledger.audit.finding import Finding
from rlk_ledger.audit.view import make_view
from rlk_ledger.history import History, load_history
from rlk_ledger.ledger import Ledger
from rlk_ledger.pairs import PairedSample, Pairing, pair
from rlk_ledger.verify import verify
from rlk_ledger_kernels.errors import KernelError
from rlk_ledger_replay.arms import ARMS, ArmName
from rlk_ledger_replay.attempts import Attempts
from rlk_ledger_replay.checkpoint import CheckpointError
from rlk_ledger_replay.judgement import Judgement, judge, unscored
from rlk_ledger_replay.lost import without_lost
from rlk_ledger_replay.preparation import Prepared, Request, prepare
from rlk_ledger_replay.progress import Progress, Silent
from rlk_ledger_replay.record import new_replay_id, record
from rlk_ledger_replay.result import ReplayResult
from rlk_ledger_replay.scorers.plan import LiveScores, passes, tasks
from rlk_ledger_replay.scorers.plan import run as run_live
from rlk_ledger_replay.scores import Scores, score, scorings
from rlk_ledger_replay.semantics import SIDES
from rlk_ledger_replay.verdict import combine
from rlk_ledger_schemas.errors import LedgerError, SpoolError, StoreError, UsageError


def replay(
    ledger: Ledger,
    run_id: str,
    *,
    where: str | None = None,
    request: Request | None = None,
    arms: Sequence[ArmName] = ARMS,
    progress: Progress | None = None,
    keep: bool = True,
) -> ReplayResult:
    """Replays a run and records the answer.

    where: a SQL condition over the `samples` view. arms: which arms to report; `both_native` alone needs no model.
    keep: whether the result is recorded in the ledger. Raises LedgerError when the run does not exist or does not
    verify, UsageError for a malformed condition or weights template.
    """
    started = time.monotonic()
    request, progress = request or Request(), progress or Silent()
    progress.stage("verify")
    _verified(ledger, run_id)
    progress.stage("audit")
    history = load_history(ledger, run_id)
    pairing = pair(history)
    audited = audit(history, pairing)
    progress.stage("prepare")
    prepared = prepare(ledger, history, pairing, _chosen(ledger, run_id, pairing, where), request, progress)
    replay_id = new_replay_id()
    with _attempts(request, replay_id) as attempts:
        scored = _judge(prepared, history, pairing, request, tuple(arms), progress, attempts)
    prepared, judgement, scores = scored
    findings, verdict, code = combine(audited, judgement.findings, judgement.decision)
    result = ReplayResult(
        run_id=run_id,
        replay_id=replay_id,
        verdict=verdict,
        exit_code=code,
        findings=findings,
        judgement=judgement,
        audit=audited,
        prepared=prepared,
        request=request,
        scores=scores,
        arms=tuple(arms),
        seconds=time.monotonic() - started,
        not_recorded=None if keep else "recording was switched off",
        attempts=None if attempts is None else attempts.as_dict(),
    )
    if keep:
        progress.stage("record")
        result = _recorded(ledger, result)
    return result


def _recorded(ledger: Ledger, result: ReplayResult) -> ReplayResult:
    """The result after it was recorded; a bucket that refuses costs the record, not the answer."""
    try:
        with ledger.writer(result.run_id, role="replay") as writer:
            record(result, writer)
    except (StoreError, SpoolError) as error:
        return replace(result, not_recorded=str(error))
    return result


def _verified(ledger: Ledger, run_id: str) -> None:
    """Refuses a run whose bytes are not the recorded ones: a verdict on them would be about something else."""
    checked = verify(ledger, run_id)
    if checked.exit_code == 1:
        worst = next(one for one in checked.findings if one.severity == "error")
        raise LedgerError(
            f"run {run_id!r} does not verify: {worst.object}: {worst.text}. Nothing was replayed; "
            f"`rlk-ledger verify {run_id}` says what else was changed."
        )


def _chosen(ledger: Ledger, run_id: str, pairing: Pairing, where: str | None) -> list[PairedSample]:
    if where is None:
        return pairing.pairs
    from rlk_ledger.views import select_samples

    chosen = select_samples(ledger, run_id, where)
    if not chosen:
        raise UsageError(f"no sample of run {run_id!r} satisfies --where {where!r}; nothing was replayed.")
    return [one for one in pairing.pairs if one.sample.sample_id in chosen]


def _judge(
    prepared: Prepared,
    history: History,
    pairing: Pairing,
    request: Request,
    arms: tuple[ArmName, ...],
    progress: Progress,
    attempts: Attempts | None,
) -> tuple[Prepared, Judgement, Scores | None]:
    if prepared.blocked is not None:
        return prepared, unscored(prepared, prepared.blocked), None
    if set(arms) <= {"both_native"}:
        return prepared, unscored(prepared, "only the recorded values were asked for", requested=True), None
    assert prepared.tokens is not None
    progress.stage("score", scorings(prepared.tokens, prepared.passes))
    try:
        scores = _scored(prepared, request, progress, attempts)
    except (KernelError, CheckpointError, RuntimeError, MemoryError) as error:
        return prepared, unscored(prepared, f"{type(error).__name__}: {error}", failed=True), None
    prepared, scores, findings = without_lost(prepared, scores)
    if prepared.blocked is not None:
        return prepared, unscored(prepared, prepared.blocked, failed=True), None
    engines = _live(prepared, history, request, progress)
    progress.stage("judge")
    both = set(deterministic_sides(make_view(history, pairing))) == set(SIDES)
    found = judge(prepared, scores, pairing.versions, arms=arms, determinism=both, live=engines)
    return prepared, replace(found, findings=(*found.findings, *findings)), scores


def _scored(prepared: Prepared, request: Request, progress: Progress, attempts: Attempts | None) -> Scores:
    assert prepared.tokens is not None
    return score(
        prepared.selection.pairs,
        prepared.tokens,
        prepared.passes,
        prepared.models,
        threads=request.threads,
        advance=progress.advance,
        plan=request.plan,
        attempts=attempts,
    )


@contextmanager
def _attempts(request: Request, replay_id: str) -> Iterator[Attempts | None]:
    """Where scorings are kept while the replay runs; None where they are not."""
    if request.attempts is None:
        yield None
        return
    kept = Attempts(request.attempts, replay_id, resume=request.resume)
    try:
        yield kept
    finally:
        kept.close()


def _live(prepared: Prepared, history: History, request: Request, progress: Progress) -> LiveScores | None:
    """The live engines' values, None where none was asked for."""
    if not request.live.scorers:
        return None
    assert prepared.tokens is not None
    found = tasks(prepared, history, request.live)
    progress.stage("engines", passes(found))
    return run_live(found, prepared.tokens, request.live, progress.advance)


__all__ = ["AuditResult", "Finding", "Progress", "ReplayResult", "Request", "Silent", "replay"]
