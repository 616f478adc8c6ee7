"""Imports at the same time, killed ones, and readers beside them: a run ends up with every event once."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from rlk_ledger.importers.alone import alone
from rlk_ledger.ledger import open_ledger
from rlk_ledger.verify import verify

PROGRAM = """
import sys, time
from pathlib import Path
from rlk_ledger.importers import writing
from rlk_ledger.cli import main
turn, rest = sys.argv[1], sys.argv[2:]
real = writing.read_held
def slow(*given):
    held = real(*given)
    Path(turn).touch()
    time.sleep(1.0)  # the others look at the run before this one adds to it, if they can
    return held
writing.read_held = slow
sys.exit(main(rest))
"""


def start(tmp_path: Path, name: str, url: str, form: str, path: Path) -> "subprocess.Popen[bytes]":
    words = [sys.executable, "-c", PROGRAM, str(tmp_path / name), "import", form, str(path)]
    return subprocess.Popen([*words, "--ledger", url, "--run-id", "r"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def counts(url: str) -> dict[str, int]:
    found: dict[str, int] = {}
    for _, _, fields, _ in open_ledger(url).read_events("r", {"rollout.sample", "logprobs", "batch.layout"}):
        found[fields["type"]] = found.get(fields["type"], 0) + 1
    return found


@pytest.fixture
def expected(data: Path, imports: Any) -> dict[str, int]:
    imports("slime", data / "slime", "--run-id", "r")
    return counts(imports.url)


def test_imports_of_the_same_files_at_the_same_time_add_them_once(
    data: Path, tmp_path: Path, expected: dict[str, int]
) -> None:
    url = str(tmp_path / "other")
    both = [start(tmp_path, name, url, "slime", data / "slime") for name in "ab"]
    told = [one.communicate(timeout=60) for one in both]
    assert [one.returncode for one in both] == [both[0].returncode] * 2, told
    assert counts(url) == expected
    assert verify(url, deep=True).exit_code == 0
    assert any(b"nothing was added" in out for out, _ in told)
    assert list((tmp_path / "spool").glob("import-*.lock")) == []


def test_a_killed_import_is_made_good_by_the_next_and_leaves_no_lock(
    data: Path, tmp_path: Path, expected: dict[str, int], imports: Any
) -> None:
    url = imports.url = str(tmp_path / "other")
    one = start(tmp_path, "a", url, "slime", data / "slime")
    while not (tmp_path / "a").exists():
        assert one.poll() is None
        time.sleep(0.02)
    os.kill(one.pid, signal.SIGKILL)
    one.communicate()
    imports("slime", data / "slime", "--run-id", "r")
    assert counts(url) == expected
    assert verify(url, deep=True).exit_code == 0


def test_readers_beside_an_import_see_a_whole_ledger(data: Path, tmp_path: Path, expected: dict[str, int]) -> None:
    url = str(tmp_path / "ledger")  # the run is there; a second format joins it
    one = start(tmp_path, "a", url, "vime", data / "vime")
    looks = 0
    while one.poll() is None:
        assert verify(url, deep=True).exit_code in (0, 3)
        assert counts(url)["rollout.sample"] >= expected["rollout.sample"]
        looks += 1
    one.communicate()
    assert looks


def test_a_run_is_entered_by_one_at_a_time_and_other_runs_are_not_kept_waiting(tmp_path: Path) -> None:
    with alone(tmp_path, "u", "r"), alone(tmp_path, "u", "s"), alone(tmp_path, "v", "r"):
        child = os.fork()
        if child == 0:
            with alone(tmp_path, "u", "r"):
                (tmp_path / "in").touch()
            os._exit(0)
        time.sleep(0.2)
        assert not (tmp_path / "in").exists()
    assert os.waitpid(child, 0)[1] == 0
    assert (tmp_path / "in").exists()
    assert list(tmp_path.glob("*.lock")) == []


def test_a_spool_that_cannot_be_used_is_one_sentence(
    data: Path, tmp_path: Path, imports: Any, monkeypatch: Any
) -> None:
    (tmp_path / "file").write_text("x")
    monkeypatch.setenv("RLK_SPOOL", str(tmp_path / "file"))
    assert "set RLK_SPOOL to a local directory" in imports.refused("slime", data / "slime")
