"""What audits and replays recorded about a run: verdicts, findings, gates, arms, and what they measured.

Each audit or replay is a writer of its own, so an answer is everything one such writer recorded. Where none did, the
audit is run on the spot: it needs the record alone.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rlk_ledger_replay.report.text import interval_text, is_interval
from rlk_ledger_schemas.findings import FINDINGS

if TYPE_CHECKING:
    from rlk_ledger.history import History
    from rlk_ledger.ledger import Ledger

TYPES = (
    "replay.planned",
    "case.attempted",
    "arm.scored",
    "gate.checked",
    "finding.raised",
    "verdict.reached",
)
ARMS = ("both_native", "training_reference_only", "rollout_reference_only", "both_reference")
LINKS = ("training_over_prefill", "prefill_over_decode", "decode_over_rollout", "training_over_rollout")
_RANK = {"error": 0, "gap": 1, "info": 2}

Fields = dict[str, Any]


@dataclass(frozen=True)
class Interval:
    """A measured value and its 95 % bounds; None where the data could not bound it."""

    value: float
    low: float | None
    high: float | None

    @property
    def text(self) -> str:
        """`0.0502 [0.0451, 0.0561]`."""
        return interval_text({"value": self.value, "low": self.low, "high": self.high})

    @property
    def times(self) -> str:
        """A multiple: `0.85 [0.76, 1.42]`."""
        return self._with(lambda value: f"{value:.2f}")

    @property
    def share(self) -> str:
        """A share: `49% [41%, 57%]`."""
        return self._with(lambda value: f"{round(value, 2) + 0.0:.0%}")

    def _with(self, form: Callable[[float], str]) -> str:
        low, high = ("not bounded" if bound is None else form(bound) for bound in (self.low, self.high))
        return f"{form(self.value)} [{low}, {high}]"


@dataclass
class Answer:
    """One audit's or replay's answer. `recorded` is false for the audit run while the report was made."""

    writer_id: str
    verdict: Fields | None = None
    plan: Fields | None = None
    findings: list[Fields] = field(default_factory=list)
    gates: list[Fields] = field(default_factory=list)
    arms: list[Fields] = field(default_factory=list)
    cases: list[Fields] = field(default_factory=list)
    wall_ns: int = 0
    recorded: bool = True

    @property
    def kind(self) -> str:
        """`replay` when something was planned or scored, else `audit`."""
        return "replay" if self.plan or self.arms or self.cases else "audit"

    @property
    def evidence(self) -> Fields:
        """What the verdict rests on."""
        found = (self.verdict or {}).get("evidence")
        return found if isinstance(found, dict) else {}

    def interval(self, name: str) -> Interval | None:
        """The interval the verdict's evidence holds under `name`; None where it was not measured."""
        value = self.evidence.get(name)
        middle = _float(value["value"]) if isinstance(value, dict) and is_interval(value) else None
        if middle is None or value is None:
            return None
        return Interval(middle, _float(value["low"]), _float(value["high"]))

    @property
    def as_declared(self) -> bool:
        """Whether the sides declare different things, so that replay measured what remains once each is scored so."""
        return self.evidence.get("residual") is not None

    def count(self, name: str) -> int | None:
        """One of the counts the verdict rests on: tokens, samples, groups, available."""
        counts = self.evidence.get("counts")
        found = counts.get(name) if isinstance(counts, dict) else None
        return found if isinstance(found, int) else None

    def links(self) -> list[tuple[str, Fields]]:
        """The chain decomposition as (link, statistics), the whole last; empty where it was not measured."""
        chain = self.evidence.get("chain")
        if not isinstance(chain, dict):
            return []
        return [(name, chain[name]) for name in LINKS if isinstance(chain.get(name), dict)]


def read_answers(ledger: "Ledger", run_id: str) -> list[Answer]:
    """Every recorded answer that reached a verdict or planned something, the newest last."""
    by_writer: dict[str, Answer] = {}
    for writer_id, _, fields, _ in sorted(ledger.read_events(run_id, TYPES), key=lambda event: event[:2]):
        _add(by_writer.setdefault(writer_id, Answer(writer_id)), fields)
    found = [_settled(answer) for answer in by_writer.values() if answer.verdict or answer.plan or answer.findings]
    return sorted(found, key=lambda answer: (answer.wall_ns, answer.writer_id))


def _add(answer: Answer, fields: Fields) -> None:
    answer.wall_ns = max(answer.wall_ns, fields.get("wall_ns") or 0)
    kind = fields["type"]
    if kind == "replay.planned":
        answer.plan = fields
    elif kind == "verdict.reached":
        answer.verdict = fields
    else:
        held = {
            "finding.raised": answer.findings,
            "gate.checked": answer.gates,
            "arm.scored": answer.arms,
            "case.attempted": answer.cases,
        }
        held[kind].append(fields)


def _settled(answer: Answer) -> Answer:
    """Errors first; of several attempts at an arm the last one; arms in their usual order, live engines' left out."""
    answer.findings.sort(key=lambda f: _RANK.get(str(f.get("severity")), 3))
    last = {fields.get("arm"): fields for fields in answer.arms if not str(fields.get("arm")).startswith("live:")}
    answer.arms = sorted(last.values(), key=lambda f: (_place(str(f.get("arm"))), str(f.get("arm"))))
    return answer


def _place(arm: str) -> int:
    return ARMS.index(arm) if arm in ARMS else len(ARMS)


def _float(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def audited_now(history: "History") -> Answer:
    """The audit's answer about a history, not recorded anywhere."""
    from rlk_ledger.audit import audit

    document = audit(history).to_dict()
    answer = Answer("", recorded=False)
    answer.findings = list(document["findings"])
    answer.verdict = {
        "verdict": document["verdict"],
        "decision": document["decision"],
        "reason": document["reason"],
        "exit_code": document["exit_code"],
        "subject": "audit",
        "evidence": document["summary"],
    }
    return _settled(answer)


def chosen(answers: list[Answer]) -> Answer | None:
    """The answer a report leads with: the newest replay that reached a verdict, else the newest audit that did."""
    judged = [answer for answer in answers if answer.verdict is not None]
    replays = [answer for answer in judged if answer.kind == "replay"]
    best = replays or judged
    return best[-1] if best else None


def query_of(finding_id: str, run_id: str) -> str:
    """The query that reproduces a finding, for `rlk-ledger query`; empty for an id this version does not know."""
    known = FINDINGS.get(finding_id)
    return "" if known is None else known.query.replace("$run", "'" + run_id.replace("'", "''") + "'")
