"""Everything a report shows, read from the ledger alone."""

import re
import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlk_ledger.history import History, load_history
from rlk_ledger.metrics import Drift
from rlk_ledger.pairs import Pairing, pair
from rlk_ledger.verify import verify
from rlk_ledger_replay.report import coverage as covered
from rlk_ledger_replay.report import drift as drifted
from rlk_ledger_replay.report.answers import Answer, audited_now, chosen, read_answers
from rlk_ledger_replay.report.provenance import Provenance, provenance
from rlk_ledger_replay.report.splits import Split, splits
from rlk_ledger_replay.report.strips import Strip, strips
from rlk_ledger_schemas.objects import Receipt

if TYPE_CHECKING:
    from rlk_ledger.ledger import Ledger
    from rlk_ledger.verify import Finding

_USER_INFO = re.compile(r"(?<=://)[^/@\s]*@")


@dataclass(frozen=True)
class Checked:
    """What `verify` said of the run: its exit code and its findings as sentences."""

    exit_code: int
    findings: tuple[str, ...]


@dataclass(frozen=True)
class Report:
    """The data of one report. `url` holds no credentials; `answers` are all recorded ones, `lead` the one shown."""

    run_id: str
    url: str
    ledger_id: str
    lead: Answer
    answers: tuple[Answer, ...]
    drift: Drift
    steps: tuple[drifted.StepDrift, ...]
    histogram: drifted.Histogram | None
    worst: tuple[drifted.WorstToken, ...]
    strips: tuple[Strip, ...]
    splits: tuple[Split, ...]
    provenance: Provenance
    coverage: tuple[covered.Line, ...]
    writers: tuple[covered.Writer, ...]
    gaps: tuple[covered.Gap, ...]
    segments: covered.Segments
    verified: Checked

    @property
    def replayed(self) -> bool:
        """Whether a replay reached the verdict."""
        return self.lead.kind == "replay"


def gather(ledger: "Ledger", run_id: str) -> Report:
    """Reads the report of a run; raises LedgerError when the run does not exist or cannot be read."""
    run = ledger.run(run_id)
    history = load_history(ledger, run_id)
    pairing = pair(history)
    answers = read_answers(ledger, run_id)
    receipts = covered.evidence_receipts(run.receipts)
    return _report(ledger, history, pairing, answers, receipts)


def _report(
    ledger: "Ledger", history: History, pairing: Pairing, answers: list[Answer], receipts: list[Receipt]
) -> Report:
    found = drifted.columns(pairing)
    total = drifted.overall(found)
    lead = chosen(answers) or audited_now(history)
    kept = {name for receipt in receipts for name in (w.writer_id for w in receipt.writers)}
    return Report(
        run_id=history.run_id,
        url=public_url(ledger.url),
        ledger_id=ledger.info.ledger_id,
        lead=lead,
        answers=tuple(answers),
        drift=total,
        steps=tuple(drifted.by_step(found)),
        histogram=drifted.histogram(found),
        worst=tuple(drifted.worst_tokens(pairing, found)),
        strips=tuple(strips(pairing, lead.writer_id)),
        splits=tuple(splits(history, pairing)),
        provenance=provenance(history),
        coverage=tuple(covered.lines(history, pairing, total)),
        writers=tuple(w for w in covered.writers(history, receipts) if w.writer_id in kept),
        gaps=tuple(covered.gaps(history)),
        segments=covered.segments(receipts),
        verified=_verified(ledger, history.run_id),
    )


def _verified(ledger: "Ledger", run_id: str) -> Checked:
    result = verify(ledger, run_id)
    return Checked(int(result.exit_code), tuple(_sentence(finding) for finding in result.findings))


def _sentence(finding: "Finding") -> str:
    return f"{finding.severity}, {finding.kind}: {finding.text} ({finding.object})"


def public_url(url: str) -> str:
    """A ledger's URL without user name and password: a report is handed to other people."""
    return _USER_INFO.sub("", url)


def commands(report: Report) -> list[tuple[str, str]]:
    """The commands that give every answer on the page again, each with what it does."""
    at, run = shlex.quote(report.url), shlex.quote(report.run_id)
    return [
        ("Is the record intact?", f"rlk-ledger verify {run} --ledger {at}"),
        ("What does the record alone show?", f"rlk-ledger audit {run} --ledger {at}"),
        ("Which side drifts, and by how many noise floors?", f"rlk-ledger replay --run-id {run} --ledger {at}"),
        ("The drift by step", f"rlk-ledger drift {run} --ledger {at} --by step"),
        ("This page again", f"rlk-ledger report {run} --ledger {at}"),
    ]
