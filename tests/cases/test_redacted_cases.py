"""The field cases recorded under redaction: hashed tokens cost the audit nothing; left out, exactly three findings."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlk_ledger.audit import audit
from rlk_ledger.cli import main
from rlk_ledger.history import load_history
from rlk_ledger.ledger import Ledger, open_ledger
from rlk_ledger.verify import verify

HERE = Path(__file__).parent
CASES = sorted(path for path in (HERE / "data").iterdir() if path.is_dir())
BY_TOKENS = {
    "08-retokenised-at-turn-seam": "tokens.differ",
    "20-inputs-misaligned": "tokens.differ",
    "21-group-of-clones": "group.duplicates",
}
"""What can be seen by comparing tokens with tokens only, and so by nobody who has none."""
DROPPED = [*BY_TOKENS, "00-clean", "07-off-by-one", "14-nan-recorded", "24-clean-varied"]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Ledger]:
    """The ledger of the cases under a redaction, recorded once."""
    made: dict[str, Ledger] = {}

    def ledger(mode: str) -> Ledger:
        if mode not in made:
            root = tmp_path_factory.mktemp(mode)
            environment = {k: v for k, v in os.environ.items() if not k.startswith("RLK_")}
            environment |= {"RLK_REDACTION": mode, "RLK_REDACTION_KEY": "correct horse battery staple"}
            cases = [str(c) for c in CASES if mode != "drop" or c.name in DROPPED]
            script = [sys.executable, str(HERE / "record_cases.py"), str(root / "ledger"), str(root / "spools")]
            done = subprocess.run([*script, *cases], env=environment, capture_output=True, text=True, timeout=240)
            assert done.returncode == 0, done.stderr
            made[mode] = open_ledger(str(root / "ledger"))
        return made[mode]

    return ledger


def found(ledger: Ledger, run: str) -> tuple[str, list[tuple[str, str, str]]]:
    """The verdict, and id, severity and place of each finding; evidence quotes tokens, which differ."""
    result = audit(load_history(ledger, run))
    rows: list[dict[str, Any]] = [f.to_dict() for f in result.findings]
    return result.verdict, [(f["finding_id"], f["severity"], json.dumps(f["where"], sort_keys=True)) for f in rows]


@pytest.mark.parametrize("case", [case.name for case in CASES])
def test_hashed_tokens_are_judged_as_open_ones(case: str, recorded: Callable[[str], Ledger]) -> None:
    assert found(recorded("hash"), case) == found(recorded("none"), case)


@pytest.mark.parametrize("case", DROPPED)
def test_tokens_left_out_cost_what_only_tokens_show_and_the_audit_says_so(
    case: str, recorded: Callable[[str], Ledger]
) -> None:
    verdict, whole = found(recorded("none"), case)
    left_verdict, left = found(recorded("drop"), case)
    assert "tokens.redacted" in {name for name, _, _ in left}
    left = [row for row in left if row[0] != "tokens.redacted"]
    assert left == [row for row in whole if row[0] != BY_TOKENS.get(case)]
    assert (left_verdict == verdict) == (case not in BY_TOKENS)


@pytest.mark.parametrize("mode", ["hash", "drop"])
def test_replay_is_not_applicable_and_says_why(
    mode: str, recorded: Callable[[str], Ledger], capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch")
    code = main(["replay", "--run-id", "00-clean", "--ledger", recorded(mode).url, "--json"])
    document = json.loads(capsys.readouterr().out)
    assert (code, document["verdict"], document["decision"]) == (3, "not_applicable", "not_applicable")
    (finding,) = [f for f in document["findings"] if f["finding_id"] == "replay.redacted"]
    assert f"redacted ({mode})" in finding["evidence"]["reason"]
    assert main(["replay", "--run-id", "00-clean", "--ledger", recorded(mode).url]) == 3
    assert capsys.readouterr().out.startswith("NOT APPLICABLE")


def test_two_keys_in_one_run_are_named_and_accuse_nobody(tmp_path: Path) -> None:
    case = HERE / "data" / "00-clean"
    for role, key in (("rollout", "correct horse battery"), ("training", "staple correct horse")):
        lines = [json.loads(line) for line in (case / "events.jsonl").read_text().splitlines()]
        mine = [line for line in lines if line["writer"].startswith(role[:5])]
        (tmp_path / role).mkdir()
        (tmp_path / role / "00-clean").mkdir()
        opened = next(line for line in lines if line["type"] == "run.opened") | {"writer": mine[0]["writer"]}
        mine = [opened, *(line for line in mine if line["type"] != "run.opened")]
        text = "".join(json.dumps(line) + "\n" for line in mine)
        (tmp_path / role / "00-clean" / "events.jsonl").write_text(text)
        environment = {k: v for k, v in os.environ.items() if not k.startswith("RLK_")}
        environment |= {"RLK_REDACTION": "hash", "RLK_REDACTION_KEY": key}
        script = [sys.executable, str(HERE / "record_cases.py"), str(tmp_path / "ledger"), str(tmp_path / "spools")]
        command = [*script, str(tmp_path / role / "00-clean")]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stderr
    history = load_history(open_ledger(str(tmp_path / "ledger")), "00-clean")
    result = audit(history)
    assert [f for f in result.findings if f.severity == "error"] == []
    (finding,) = [f for f in result.findings if f.where.get("field") == "redaction"]
    assert len(finding.where["ways"]) == 2
    named = [f.text for f in verify(str(tmp_path / "ledger")).findings if f.kind == "run.redeclared"]
    assert len(named) == 1
    assert "its tokens do not compare with those of the others" in named[0]
