"""The demo from an empty folder to an answer: run both engines, verify, audit, replay, report."""

import os
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlk_ledger_replay.demo.engines import run_engines
from rlk_ledger_replay.demo.phases import Phases
from rlk_ledger_replay.demo.settings import Settings, write_settings
from rlk_ledger_schemas.errors import LedgerError, UsageError
from rlk_ledger_sdk.filesystem import is_network, name_of

if TYPE_CHECKING:
    from rlk_ledger.audit import AuditResult
    from rlk_ledger.ledger import Ledger
    from rlk_ledger.verify import VerifyResult
    from rlk_ledger_replay.result import ReplayResult

REPORT = "report.html"
REPLAYED_SAMPLES = 64


@dataclass(frozen=True)
class Outcome:
    """One finished demo: what verify and replay answered, and where the report is."""

    settings: Settings
    verified: "VerifyResult"
    result: "ReplayResult"
    report: Path
    timings: dict[str, float]

    @property
    def exit_code(self) -> int:
        """Replay's exit code, which is the audit's and its own findings'."""
        return self.result.exit_code

    def to_dict(self) -> dict[str, Any]:
        """Replay's document with the demo's places and timings (seconds) added."""
        return self.result.to_dict() | {
            "fault": self.settings.fault,
            "ledger": self.settings.ledger,
            "report": str(self.report),
            "verify": self.verified.verdict,
            "timings": {name: round(seconds, 3) for name, seconds in self.timings.items()},
        }


def prepare(directory: Path, fault: str | None, steps: int, seed: int) -> Settings:
    """The settings of a new run in `directory`, which is made; raises UsageError when it cannot hold one."""
    root = directory.expanduser().resolve()
    try:
        root.mkdir(parents=True, exist_ok=True)
        (root / "work").mkdir(exist_ok=True)
    except OSError as error:
        raise UsageError(f"{root} cannot hold a demo: {error.strerror}; give another --dir.") from None
    model = resources.files("rlk_ledger_replay") / "model"
    name = "demo" if fault is None else f"demo-{fault}"
    return Settings(
        root=str(root),
        run_id=free_run_id(root, name),
        model=str(model),
        spool=spool_place(root),
        fault=fault,
        steps=steps,
        seed=seed,
    )


def free_run_id(root: Path, name: str) -> str:
    """`name`, or `name-2`, `name-3` ... where the folder already holds such a run."""
    taken = {path.name for folder in ("work", "weights", "ledger/runs") for path in (root / folder).glob("*")}
    number = 1
    while (candidate := name if number == 1 else f"{name}-{number}") in taken:
        number += 1
    return candidate


def spool_place(root: Path) -> str:
    """Where to spool: in `root`, or in a temporary folder when `root` is on a network file system.

    Recorders refuse such a file system unless it is named; it is named when no other one is there.
    """
    if not is_network(name_of(str(root))):
        return str(root / "spool")
    for place in ("/var/tmp", tempfile.gettempdir()):
        if os.access(place, os.W_OK) and not is_network(name_of(place)):
            return tempfile.mkdtemp(prefix="rlk-demo-", dir=place)
    return f"{name_of(str(root))}:{root / 'spool'}"


def run_demo(settings: Settings, phases: Phases) -> Outcome:
    """Runs the whole demo. Raises EngineFailed, LedgerError when what was recorded is damaged, SpoolError."""
    settings_file = write_settings(settings)
    with phases.phase("engines", "two processes sample, learn and record") as phase:
        run_engines(settings, settings_file, lambda done: phase.reach(done, 2 * settings.steps))
        phase.note(_engines_line(settings))
    import rlk_ledger

    ledger = rlk_ledger.open(settings.ledger)
    verified = _verify(ledger, settings, phases)
    _audit(ledger, settings, phases)
    result = _replay(ledger, settings, phases)
    report = Path(settings.root) / REPORT
    with phases.phase("report", "draw what the ledger holds") as phase:
        from rlk_ledger_replay.report import write_report

        write_report(ledger, settings.run_id, report)
        phase.note(str(report))
    return Outcome(settings, verified, result, report, dict(phases.timings))


def _engines_line(settings: Settings) -> str:
    samples = settings.groups * settings.group_size
    return f"{settings.steps} steps of {samples} samples in {settings.groups} groups, {settings.steps} weight updates"


def _verify(ledger: "Ledger", settings: Settings, phases: Phases) -> "VerifyResult":
    from rlk_ledger.verify import verify

    with phases.phase("verify", "every event, file and chain") as phase:
        verified = verify(ledger, settings.run_id, deep=True, progress=phase.reach)
        phase.note(f"{verified.verdict}: {verified.events:,} events in {verified.segments} segments")
    if verified.exit_code:
        worst = verified.findings[0]
        raise LedgerError(f"the demo's own ledger does not verify: {worst.object}: {worst.text}.")
    return verified


def _audit(ledger: "Ledger", settings: Settings, phases: Phases) -> "AuditResult":
    from rlk_ledger.audit import audit
    from rlk_ledger.history import load_history

    with phases.phase("audit", "what the record alone shows") as phase:
        audited = audit(load_history(ledger, settings.run_id))
        phase.note(_findings_line(audited.findings) or "no error and no gap in the record")
    return audited


def _findings_line(findings: Sequence[Any]) -> str:
    counts = Counter(one.finding_id for one in findings if one.severity != "info")
    return ", ".join(f"{name} x {count}" if count > 1 else name for name, count in counts.items())


def _replay(ledger: "Ledger", settings: Settings, phases: Phases) -> "ReplayResult":
    from rlk_ledger_replay.preparation import Request
    from rlk_ledger_replay.run import replay

    with phases.phase("replay", "score both sides with the reference") as phase:
        request = Request(samples=REPLAYED_SAMPLES, seed=settings.seed)
        result = replay(ledger, settings.run_id, request=request, progress=phase)
        phase.note(f"{result.decision.decision.replace('_', ' ')}, {result.counts()['tokens']:,} tokens scored")
    return result
