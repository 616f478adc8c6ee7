"""Writing a report: in one step, recorded, and the same bytes again from the same record."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rlk_ledger import cli
from rlk_ledger.ledger import open_ledger
from rlk_ledger_replay.report import ReportError, write_report
from rlk_ledger_replay.report.gather import public_url
from rlk_ledger_replay.report.text import clean, cut, interval_text, number, percent
from rlk_ledger_schemas.errors import LedgerError, StoreError
from rlk_ledger_schemas.fingerprints import sha256


def test_a_report_is_recorded_with_its_digest(make: Any, healthy: Any, tmp_path: Path) -> None:
    ledger = make(healthy(steps=1))
    info = write_report(ledger, "run-1", tmp_path / "out" / "page.html")
    data = info.path.read_bytes()
    assert (info.digest, info.bytes, info.recorded) == (sha256(data), len(data), True)
    written = [fields for _, _, fields, _ in open_ledger(ledger.url).read_events("run-1", ["report.written"])]
    assert [(w["digest"], w["bytes"], w["name"]) for w in written] == [(info.digest, info.bytes, "page.html")]


def test_a_report_can_be_rebuilt_bit_for_bit(make: Any, healthy: Any, replayed: Any, tmp_path: Path) -> None:
    ledger = make([*healthy(steps=2), *replayed()])
    digests = {
        write_report(open_ledger(ledger.url), "run-1", tmp_path / f"{i}.html", record=i < 2).digest for i in range(3)
    }
    assert len(digests) == 1


def test_a_new_answer_changes_the_report(make: Any, healthy: Any, tmp_path: Path) -> None:
    ledger = make(healthy(steps=1))
    before = write_report(ledger, "run-1", tmp_path / "a.html", record=False)
    with ledger.writer("run-1") as writer:
        judged = {"verdict": "fail", "subject": "audit", "decision": "named", "reason": "Because.", "exit_code": 1}
        writer.record("verdict.reached", **judged)
    after = write_report(open_ledger(ledger.url), "run-1", tmp_path / "b.html", record=False)
    assert (after.verdict, after.exit_code) == ("fail", 1)
    assert before.digest != after.digest


def test_a_failed_write_leaves_the_old_file_and_no_other(
    make: Any, healthy: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = make(healthy(steps=1))
    target = tmp_path / "out" / "page.html"
    target.parent.mkdir()
    target.write_text("old")

    def refuse(self: Path, other: Any) -> Path:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", refuse)
    with pytest.raises(ReportError, match="cannot be written \\(No space left on device\\)"):
        write_report(ledger, "run-1", target)
    assert [path.name for path in target.parent.iterdir()] == ["page.html"]
    assert target.read_text() == "old"


def test_a_ledger_that_takes_no_event_still_gives_a_report(
    make: Any, healthy: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = make(healthy(steps=1))

    def refuse(*_: Any, **__: Any) -> Any:
        raise StoreError("read-only.")

    monkeypatch.setattr(ledger, "writer", refuse)
    info = write_report(ledger, "run-1", tmp_path / "page.html")
    assert info.path.exists()
    assert not info.recorded
    assert info.warning.endswith("read-only.")


@pytest.mark.parametrize(
    ("name", "says"), [("", "is a folder; name the HTML file"), ("file/page.html", "cannot be written")]
)
def test_a_place_that_cannot_hold_a_file_is_named(make: Any, sides: Any, tmp_path: Path, name: str, says: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ReportError, match=says):
        write_report(make(sides()), "run-1", tmp_path / name)


def test_a_missing_run_is_an_error(make: Any, sides: Any, tmp_path: Path) -> None:
    with pytest.raises(LedgerError, match="no run 'other'"):
        write_report(make(sides()), "other", tmp_path / "page.html")
    assert not (tmp_path / "page.html").exists()


def test_the_command_writes_and_says_where(
    make: Any, healthy: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    url = make(healthy(steps=1)).url
    monkeypatch.chdir(tmp_path)
    assert cli.main(["report", "run-1", "--ledger", url, "--no-record"]) == 0
    assert str(tmp_path / "report-run-1.html") in capsys.readouterr().out
    assert cli.main(["report", "run-1", "--ledger", url, "-o", "x.html", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["path"] == "x.html"
    assert document["recorded"] is True
    assert document["digest"] == sha256((tmp_path / "x.html").read_bytes())


def test_the_command_refuses_in_one_sentence(
    make: Any, sides: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = make(sides()).url
    assert cli.main(["report", "../x", "--ledger", url]) == 2
    assert cli.main(["report", "gone", "--ledger", url, "-o", str(tmp_path / "x.html")]) == 2
    assert cli.main(["report", "run-1", "--ledger", url, "-o", str(tmp_path)]) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 3
    assert all(line.startswith("rlk-ledger: ") for line in lines)


def test_a_url_is_shown_without_credentials() -> None:
    assert public_url("s3://key:secret@bucket/rl") == "s3://bucket/rl"
    assert public_url("/data/a@b/ledger") == "/data/a@b/ledger"


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0.0, "0"),
        (0.05, "0.0500"),
        (-1.0, "-1.00"),
        (12.34, "12.3"),
        (123.4, "123.4"),
        (12345, "12,345"),
        (12345.6, "12,346"),
        (3e-7, "3.00e-07"),
        (float("nan"), "NaN"),
        (float("-inf"), "minus infinite"),
        (None, "not recorded"),
    ],
)
def test_numbers_read_well(value: float | None, shown: str) -> None:
    assert number(value) == shown


def test_shares_keep_their_small_parts() -> None:
    assert [percent(v) for v in (0.0, 0.0048, 0.5, 0.9983, 1.0)] == ["0%", "0.48%", "50.0%", "99.83%", "100%"]


def test_bounds_the_data_could_not_give_are_said() -> None:
    assert interval_text({"value": 1.0, "low": 0.5, "high": None}) == "1.00 [0.500, not bounded]"


def test_long_text_says_how_much_is_left_out() -> None:
    assert cut("a" * 700) == "a" * 600 + " ... (100 more characters)"


def test_ordinary_text_of_any_language_is_left_alone() -> None:
    assert clean("größe 数 é\n") == "größe 数 é\n"


def test_without_jinja2_the_command_says_what_to_install() -> None:
    code = (
        "import sys; sys.modules['jinja2'] = None\n"
        "import importlib.util as u; find = u.find_spec\n"
        "u.find_spec = lambda name, *a: None if name == 'jinja2' else find(name, *a)\n"
        "import rlk_ledger_replay.report\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr.strip().endswith("a report needs jinja2: pip install 'rlk-ledger[report]'.")
