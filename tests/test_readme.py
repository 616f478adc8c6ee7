"""The README's examples run as printed, and its tables name every command, event, field and variable."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import msgspec

from rlk_ledger.doctor.machine import VARIABLES
from rlk_ledger.views import VIEWS
from rlk_ledger_schemas.events import ASSIGNED, REGISTRY

README = (Path(__file__).resolve().parents[1] / "README.md").read_text()

ABOUT = (".replays", ".certificates")
"""Where the events are that commands record, and no job."""


def block(marker: str) -> str:
    found = re.search(rf"<!-- example: {re.escape(marker)} -->\n```\w+\n(.*?)```", README, re.DOTALL)
    assert found, f"README has no block marked {marker!r}"
    return found.group(1)


def session(marker: str) -> list[tuple[str, list[str]]]:
    """(command, lines it must print in this order) of a console block; `...` stands for any lines."""
    out: list[tuple[str, list[str]]] = []
    for line in block(marker).splitlines():
        if line.startswith("$ "):
            out.append((line[2:], []))
        elif line and line != "...":
            out[-1][1].append(line)
    return out


def run(command: str, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    words = shlex.split(command)
    bin_ = Path(sys.executable).parent
    words[0] = sys.executable if words[0] == "python" else str(bin_ / words[0])
    env = {k: v for k, v in os.environ.items() if not k.startswith("RLK_")} | {"RLK_SPOOL": str(folder / "spool")}
    env |= variables
    return subprocess.run(words, cwd=folder, env=env, capture_output=True, text=True, timeout=120, check=False)


def play(marker: str, folder: Path) -> tuple[subprocess.CompletedProcess[str], dict[str, str]]:
    """Runs a console block and compares what it prints; returns the last result and the exported variables."""
    variables: dict[str, str] = {}
    last = None
    for command, wanted in session(marker):
        if command.startswith("export "):
            name, _, value = command.removeprefix("export ").partition("=")
            variables[name] = value
            continue
        last = run(command, folder, **variables)
        shown = [without_sizes(line) for line in wanted]
        printed = [line for line in map(without_sizes, last.stdout.splitlines()) if line in shown]
        assert shown == printed, f"{command}: {last.stdout}{last.stderr}"
        if not wanted:
            assert (last.returncode, last.stderr) == (0, ""), f"{command}: {last.stderr}"
    assert last is not None
    return last, variables


def without_sizes(line: str) -> str:
    return re.sub(r"[\d.]+ KB", "N KB", line)


def table(heading: str, header: str) -> list[list[str]]:
    """The cells of the table under `heading` whose first row begins with `header`."""
    section = README.split(f"\n{heading}\n")[1]
    rows = section[section.index(f"| {header} |") :].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in row.strip("|").split(" | ")] for row in rows]


def test_the_first_example_prints_what_the_readme_shows(tmp_path: Path) -> None:
    (tmp_path / "side.py").write_text(block("side.py"))
    last, _ = play("session", tmp_path)
    assert last.returncode == 1


def test_the_evidence_is_made_and_checked_from_python(tmp_path: Path) -> None:
    for name in ("side.py", "believe.py"):
        (tmp_path / name).write_text(block(name))
    for command in ("python side.py rollout 1.0 -0.5 -1.2 -0.1", "python side.py training 1.0 -0.5 -1.2 -0.1"):
        assert run(command, tmp_path).returncode == 0
    done = run("python believe.py", tmp_path)
    assert (done.stdout, done.stderr) == ("intact\n", "")
    checker = Path(__file__).parents[1] / "tools" / "check_proof.py"
    assert run(f"python -I -S {checker} proof.json", tmp_path).returncode == 0


def test_the_strict_step_prints_what_left_the_batch_and_what_drifted(tmp_path: Path) -> None:
    (tmp_path / "strict_step.py").write_text(block("strict_step.py"))
    last, _ = play("strict", tmp_path)
    assert last.returncode == 0


def test_the_instrumented_loop_passes_and_its_forgotten_temperature_is_measured(tmp_path: Path) -> None:
    for name in ("rollout_side.py", "training_side.py"):
        (tmp_path / name).write_text(block(name))
    last, variables = play("loop", tmp_path)
    assert last.returncode == 0
    variables["RLK_LEDGER"] = "another-run"
    for command in ("python rollout_side.py", "python training_side.py --forget-temperature"):
        assert run(command, tmp_path, **variables).returncode == 0
    found = run("rlk-ledger audit r42", tmp_path, **variables)
    assert found.returncode == 1
    assert "contract.differs (field temperature)" in found.stdout
    assert re.search(r"\bslope 1\.4\d*", found.stdout)


def test_the_event_table_names_what_a_job_records_and_what_is_required() -> None:
    rows = {row[0].strip("`"): row for row in table("## Instrumenting your own loop", "event")}
    own = {"run.opened", "writer.opened", "writer.closed", "writer.lost", "gap", "segments.pruned"}
    assert rows.keys() == {n for n, t in REGISTRY.items() if not t.public.__module__.endswith(ABOUT)} - own
    for name, row in rows.items():
        kind = REGISTRY[name]
        fields = {f.name for f in msgspec.structs.fields(kind.wire) if f.required} - set(ASSIGNED)
        required = fields | set(kind.required_arrays)
        if row[2].startswith("the same"):
            required -= {"weight_version", "digest", "tensor_count"}
        assert set(re.findall(r"`(\w+)`", row[2])) == required, name
        assert set(re.findall(r"`(\w+)(?:=.*?)?`", row[3])) <= kind.names | {"norm", "attention", "rope"}, name


def test_the_environment_table_names_every_variable_and_nothing_else() -> None:
    named = {name for row in table("### Environment", "variable") for name in re.findall(r"RLK_\w+", row[0])}
    root = Path(__file__).resolve().parents[1]
    sources = [p for package in root.glob("*/rlk_ledger*") for p in package.rglob("*.py")]
    assert len(sources) > 100
    used = {name for path in sources for name in re.findall(r"\bRLK_[A-Z_]*[A-Z]\b", path.read_text())}
    assert named == used
    assert named == VARIABLES, "what doctor knows; any other name is a slip"


def test_the_command_table_names_every_command_and_nothing_else() -> None:
    help_ = run("rlk-ledger --help", Path.cwd()).stdout
    commands = set(re.findall(r"^  ([a-z]+)  ", help_.split("Commands:")[1], re.MULTILINE))
    table = README.split("## Commands")[1].split("##")[0]
    named = {
        word for cell in re.findall(r"^\| (`.*?`) \|", table, re.MULTILINE) for word in re.findall(r"`([a-z]+)", cell)
    }
    assert named == commands


def test_the_query_row_names_every_view() -> None:
    found = re.search(r"over the views `(.*?)`", README)
    assert found
    assert sorted(found[1].split()) == sorted(VIEWS)
