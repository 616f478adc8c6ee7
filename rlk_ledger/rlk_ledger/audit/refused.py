"""Were there events that nobody can read as what they claim to be? (evidence.incomplete)"""

from collections import defaultdict
from collections.abc import Iterable

from rlk_ledger.audit.finding import Finding
from rlk_ledger.audit.view import View
from rlk_ledger.refusals import Refused

_NEXT = "Find what wrote the named event: it did not come through the recorder, which refuses such values."


def detect(view: View) -> Iterable[Finding]:
    """One gap per event type and field, with the first event and how many there are."""
    found: dict[tuple[str, str], list[Refused]] = defaultdict(list)
    for one in view.history.refused:
        found[one.type, one.field].append(one)
    for (kind, field), rows in found.items():
        first = rows[0]
        where = {"type": kind, "field": field, "writer": first.writer_id, "seq": first.seq}
        evidence = {"reason": first.reason, "events": len(rows), "seqs": [one.seq for one in rows[:20]]}
        yield Finding("evidence.incomplete", where, evidence, _NEXT)
