"""From findings to a verdict and an exit code.

An audit measures no noise floor, so its pass means: no error and no gap in the record. How large drift may be is for
replay to say.
"""

from collections.abc import Iterable

from rlk_ledger.audit import contracts
from rlk_ledger.audit.finding import Finding
from rlk_ledger.pairs import SIDES
from rlk_ledger_schemas.findings import Exit, Verdict, exit_code

_NOT_COMPARABLE = frozenset({"tokens.differ", "mask.differs", "alignment.shift", "samples.ambiguous"})


def decide(findings: Iterable[Finding], compared: int) -> tuple[Verdict, int, str, str]:
    """(verdict, exit code, decision, reason): not comparable before fail, fail before inconclusive, else pass.

    `compared` counts the tokens drift was computed over: nothing compared is never a pass.
    """
    rows = list(findings)
    code = exit_code(f.severity for f in rows)
    apart = [f for f in rows if not_comparable(f)]
    errors = [f for f in rows if f.severity == "error"]
    gaps = [f for f in rows if f.severity == "gap"]
    if apart:
        return "not_comparable", code, "comparability", f"the sides are not comparable: {named(apart)}"
    if errors:
        return "fail", code, "record", f"the record itself shows what is wrong: {named(errors)}"
    if gaps:
        return "inconclusive", code, "coverage", f"part of the run cannot be judged: {named(gaps)}"
    if not compared:
        reason = "no token was scored by both sides under one weight version, so nothing was compared"
        return "inconclusive", Exit.GAP, "nothing_compared", reason
    zero = next((f for f in rows if f.finding_id == "drift.zero"), None)
    if zero is not None:
        equal = f"{zero.evidence['equal_fraction']:.2%} of the tokens are bitwise equal"
        if set(zero.evidence["deterministic_sides"]) < set(SIDES):
            reason = f"{equal}, and the record does not show that both sides are deterministic: one may be a copy"
            return "inconclusive", Exit.GAP, "drift.zero", reason
        return "pass", code, "drift.zero", f"{equal}, with determinism of both sides read back on record"
    return "pass", code, "record", "the record shows no error and no gap; how large drift may be was not judged"


def not_comparable(finding: Finding) -> bool:
    """Whether a finding makes numbers of the two sides different quantities."""
    return finding.finding_id in _NOT_COMPARABLE or contracts.is_semantic(finding)


def named(findings: list[Finding]) -> str:
    """Their ids with what identifies each, at most three."""
    texts = []
    for finding in findings[:3]:
        keys = ("field", "engine", "version", "dimension", "level", "path", "side", "lag", "source")
        detail = ", ".join(f"{k} {finding.where[k]}" for k in keys if finding.where.get(k) is not None)
        texts.append(f"{finding.finding_id} ({detail})" if detail else finding.finding_id)
    more = len(findings) - len(texts)
    return "; ".join(texts) + (f"; and {more} more" if more > 0 else "")
