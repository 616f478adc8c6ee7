"""`rlk-ledger demo` comes out right for the right reason: clean within its floor, each fault named."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

import rlk_ledger
from rlk_ledger_replay.demo import flow
from rlk_ledger_replay.demo.engines import EngineFailed, engine_environment, run_engines
from rlk_ledger_replay.demo.faults import FAULTS
from rlk_ledger_replay.demo.flow import free_run_id, prepare
from rlk_ledger_replay.demo.settings import write_settings
from rlk_ledger_schemas.errors import UsageError

STEPS = 2
COMMAND = str(Path(sys.executable).with_name("rlk-ledger"))


def rlk(*arguments: str) -> "subprocess.CompletedProcess[str]":
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("RLK_", "PYTEST_"))}
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run([COMMAND, *arguments], capture_output=True, text=True, env=environment, timeout=280)


def shell(line: str) -> "subprocess.CompletedProcess[str]":
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    return subprocess.run(line, shell=True, capture_output=True, text=True, env=environment, timeout=120)


def demo(directory: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    done = rlk("demo", "--dir", str(directory), "--json", *arguments)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def errors(document: dict[str, Any]) -> list[dict[str, Any]]:
    return [one for one in document["findings"] if one["severity"] == "error"]


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int, dict[str, Any]]:
    directory = tmp_path_factory.mktemp("demo")
    code, document = demo(directory)
    return directory, code, document


@pytest.mark.demo
def test_without_a_fault_the_drift_is_within_its_floor(clean: tuple[Path, int, dict[str, Any]]) -> None:
    _, code, document = clean
    assert code == 0
    assert document["verdict"] == "pass"
    assert document["decision"] == "within_floor"
    assert [one["severity"] for one in document["findings"]] == ["info"] * len(document["findings"])
    for side in ("rollout", "training", "drift"):
        assert 0.0 < document["numbers"][f"multiple_{side}"]["value"] < 1.5
    assert document["counts"]["groups"] >= 16
    assert list(document["timings"]) == ["engines", "verify", "audit", "replay", "report"]


@pytest.mark.demo
def test_the_record_holds_every_version_and_both_sides(clean: tuple[Path, int, dict[str, Any]]) -> None:
    directory, _, _ = clean
    ledger = rlk_ledger.open(str(directory / "ledger"))
    events = [fields for _, _, fields, _ in ledger.read_events("demo", ["weights.published", "weights.loaded"])]
    published = {e["weight_version"]: e["digest"] for e in events if e["type"] == "weights.published"}
    held = {e["weight_version"]: e["digest"] for e in events if e["type"] == "weights.loaded"}
    assert list(published) == [f"v{i}" for i in range(5)]
    assert len(set(published.values())) == 5
    assert held == {version: published[version] for version in ("v0", "v1", "v2", "v3")}
    scores = [fields for _, _, fields, _ in ledger.read_events("demo", ["logprobs"])]
    engines = {(one["source"], one["step"]) for one in scores if not one["source"].startswith("replay:")}
    assert engines == {(side, step) for side in ("rollout", "training") for step in range(4)}


@pytest.mark.demo
def test_the_report_opens_offline(clean: tuple[Path, int, dict[str, Any]]) -> None:
    directory, _, document = clean
    assert document["report"] == str(directory.resolve() / "report.html")
    page = (directory / "report.html").read_text()
    fetched = re.findall(r"""(?:\bsrc|<link[^>]*\bhref)\s*=\s*["']?([^"'\s>]+)|url\(["']?([^"')]+)""", page)
    assert not [link for pair in fetched for link in pair if link and not link.startswith(("data:", "#"))]
    assert "@import" not in page
    assert "within" in page


@pytest.mark.demo
def test_a_second_run_joins_the_ledger_and_its_suggestions_work(
    clean: tuple[Path, int, dict[str, Any]], tmp_path: Path
) -> None:
    """Pasted one after the other: the query answers, verify is content, one flipped bit is found."""
    directory = shutil.copytree(clean[0], tmp_path / "copy")
    done = rlk("demo", "--dir", str(directory), "--steps", "1")
    assert done.returncode == 0, done.stderr + done.stdout
    assert "run demo-2 in" in done.stdout
    assert f"Report: {directory.resolve() / 'report.html'}" in done.stdout
    assert rlk_ledger.open(str(directory / "ledger")).runs() == ["demo", "demo-2"]

    query, verify, damage = [line.strip() for line in done.stdout.partition("Try:\n")[2].splitlines()]
    answer = shell(query)
    assert answer.returncode == 0, answer.stderr
    assert "drift" in answer.stdout
    assert shell(verify).returncode == 0
    assert shell(damage).returncode == 0
    assert shell(verify).returncode == 1


@pytest.mark.demo
@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_is_named(tmp_path: Path, fault: str) -> None:
    code, document = demo(tmp_path, "--fault", fault, "--steps", str(STEPS))
    assert code == 1
    found = errors(document)
    assert {one["finding_id"] for one in found} >= set(FAULTS[fault].named_by)
    where = next(one["where"] for one in found if one["finding_id"] == FAULTS[fault].named_by[0])
    assert where.items() >= EXPECTED[fault].items()


EXPECTED: dict[str, dict[str, Any]] = {
    "bf16-head": {"field": "head_dtype"},
    "no-temperature": {"field": "temperature"},
    "stale-weights": {"version": "v1", "engine": "rollout-0"},
    "off-by-one": {"side": "training", "lag": 1},
    "tool-tokens": {},
    "weights-ahead": {"side": "training"},
}


def test_a_failed_engine_is_quoted_and_the_other_one_stopped(tmp_path: Path) -> None:
    settings = prepare(tmp_path, None, 1, 0)
    broken = msgspec.structs.replace(settings, model=str(tmp_path / "nothing"))
    with pytest.raises(EngineFailed, match=r"the (rollout|training) engine ended with code 1; its log is .*\.log and"):
        run_engines(broken, write_settings(broken), lambda done: None)


def test_engines_do_not_inherit_recorder_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLK_DISABLE", "1")
    monkeypatch.setenv("RLK_LEDGER", "s3://elsewhere")
    environment = engine_environment(prepare(tmp_path, None, 1, 0))
    assert not [name for name in environment if name.startswith("RLK_")]


def test_a_taken_run_id_gets_a_number(tmp_path: Path) -> None:
    assert free_run_id(tmp_path, "demo") == "demo"
    (tmp_path / "ledger" / "runs" / "demo").mkdir(parents=True)
    assert free_run_id(tmp_path, "demo") == "demo-2"
    (tmp_path / "work" / "demo-2").mkdir(parents=True)
    assert free_run_id(tmp_path, "demo") == "demo-3"


@pytest.mark.parametrize(
    ("network", "wanted"),
    [((), "{root}/spool"), (("{root}",), "{tmp}/rlk-demo-"), (("{root}", "/var/tmp", "{tmp}"), "nfs:{root}/spool")],
)
def test_the_spool_avoids_network_file_systems(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, network: tuple[str, ...], wanted: str
) -> None:
    names = {"root": str(tmp_path / "root"), "tmp": str(tmp_path / "tmp")}
    (tmp_path / "tmp").mkdir()
    remote = {place.format(**names) for place in network} | ({"/var/tmp"} if network else set())
    monkeypatch.setattr(flow.tempfile, "gettempdir", lambda: names["tmp"])
    monkeypatch.setattr(flow, "name_of", lambda path: "nfs" if path in remote else "ext4")
    assert flow.spool_place(Path(names["root"])).startswith(wanted.format(**names))


def test_a_directory_that_cannot_hold_a_demo_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"cannot hold a demo: .*; give another --dir"):
        prepare(tmp_path / "file" / "demo", None, 1, 0)


def test_an_unknown_fault_is_a_usage_error_that_lists_the_known_ones(tmp_path: Path) -> None:
    done = rlk("demo", "--dir", str(tmp_path), "--fault", "gremlins")
    assert done.returncode == 2
    assert "weights-ahead" in done.stderr
    assert not list(tmp_path.iterdir())
