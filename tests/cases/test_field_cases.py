"""Each field case, recorded by one process per writer and shipped, is what `audit --json` names, and nothing else."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rlk_ledger.cli import main

HERE = Path(__file__).parent
CASES = sorted(path for path in (HERE / "data").iterdir() if path.is_dir())


@pytest.fixture(scope="module")
def ledger(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A ledger holding every case as a run of its name, written through the recorder."""
    root = tmp_path_factory.mktemp("cases")
    environment = {k: v for k, v in os.environ.items() if not k.startswith("RLK_")}
    script = [sys.executable, str(HERE / "record_cases.py"), str(root / "ledger"), str(root / "spools")]
    command = [*script, *map(str, CASES)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return str(root / "ledger")


def matches(want: Any, have: Any) -> bool:
    if isinstance(want, dict) and "any" in want:
        return have in want["any"]
    if isinstance(want, dict) and "contains_any" in want:
        return any(text in str(have) for text in want["contains_any"])
    return bool(want == have)


@pytest.mark.parametrize("case", CASES, ids=lambda path: path.name)
def test_a_case_is_named_and_nothing_else_is(case: Path, ledger: str, capsys: pytest.CaptureFixture[str]) -> None:
    expect = json.loads((case / "expect.json").read_text())
    code = main(["audit", case.name, "--ledger", ledger, "--json"])
    document = json.loads(capsys.readouterr().out)
    findings = document["findings"]
    assert document["run_id"] == case.name
    assert matches(expect["exit"], code), findings
    if expect["verdict"] is not None:
        assert document["verdict"] == expect["verdict"]
    if expect["finding"] is not None:
        named = [f["where"] for f in findings if f["finding_id"] == expect["finding"]]
        assert any(all(matches(v, where.get(k)) for k, v in expect["where"].items()) for where in named), findings
    allowed = {expect["finding"], *expect["also_allowed"]}
    other = [f for f in findings if f["severity"] in ("error", "gap") and f["finding_id"] not in allowed]
    assert other == []


def test_the_audit_prints_what_happened_how_sure_on_which_evidence_and_what_next(
    ledger: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["audit", "03-stale-prefix-cache", "--ledger", ledger]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == (
        "fail: the record itself shows what is wrong: drift.split (dimension cache.stale, level true) - "
        "drift is concentrated in one level of a recorded dimension"
    )
    assert lines[1].startswith("how sure: ")
    assert "adjusted p" in lines[1]
    assert lines[2].startswith("compared: 2338 of 2346 active tokens, 64 of 64 samples")
    assert lines[3].startswith("evidence: ")
    assert "also_explains" in lines[3]
    assert "sample_id" not in lines[3]
    assert lines[4].startswith("next: ")
    assert "worst {run_id 03-stale-prefix-cache, sample_id s059, position 26" in lines[8]
    assert "rollout_contract sha256:d1b876e4f4e9..." in lines[8]
    assert all("\x1b" not in line for line in lines)


@pytest.mark.parametrize(
    ("run", "code", "sure", "step"),
    [
        ("00-clean", 0, "nothing on record speaks against this run", "`rlk-ledger replay --run-id 00-clean --ledger "),
        ("21-group-of-clones", 1, "chance does this less than once in a million", "Give"),
        ("22-one-mode-never-instrumented", 3, "certain that something is missing", "Instrument the named source"),
        ("26-clean-bitwise-consistent", 3, "read directly from the record", "If the engines are bitwise consistent"),
    ],
)
def test_the_next_step_is_that_of_the_verdict(
    ledger: str, run: str, code: int, sure: str, step: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run that did not pass is never told that replay will measure its noise."""
    assert main(["audit", run, "--ledger", ledger]) == code
    lines = {line.partition(": ")[0]: line.partition(": ")[2] for line in capsys.readouterr().out.splitlines()[:6]}
    assert sure in lines["how sure"]
    assert lines["next"].startswith(step)


def test_recorded_results_become_views(ledger: str, capsys: pytest.CaptureFixture[str]) -> None:
    run = "17-head-dtype-differs"
    assert main(["audit", run, "--ledger", ledger, "--record"]) == 1
    capsys.readouterr()
    query = "select finding_id, severity, subject from findings where run_id = '17-head-dtype-differs' order by seq"
    assert main(["query", query, "--ledger", ledger, "--format", "csv"]) == 0
    rows = capsys.readouterr().out.splitlines()
    assert rows == ["finding_id,severity,subject", *["contract.differs,error,audit"] * 2]
    assert main(["query", "select verdict, exit_code from verdicts", "--ledger", ledger, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == [{"verdict": "fail", "exit_code": 1}]
    assert main(["audit", run, "--ledger", ledger, "--json"]) == 1
    assert len(json.loads(capsys.readouterr().out)["findings"]) == 2
