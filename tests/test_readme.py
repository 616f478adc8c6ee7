"""The README's example runs as printed, and its command table names every command."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

README = (Path(__file__).resolve().parents[1] / "README.md").read_text()


def block(marker: str) -> str:
    found = re.search(rf"<!-- example: {re.escape(marker)} -->\n```\w+\n(.*?)```", README, re.DOTALL)
    assert found, f"README has no block marked {marker!r}"
    return found.group(1)


def session() -> list[tuple[str, list[str]]]:
    """(command, lines it must print in this order) of the console block; `...` stands for any lines."""
    out: list[tuple[str, list[str]]] = []
    for line in block("session").splitlines():
        if line.startswith("$ "):
            out.append((line[2:], []))
        elif line != "...":
            out[-1][1].append(line)
    return out


def run(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    words = shlex.split(command)
    bin_ = Path(sys.executable).parent
    words[0] = sys.executable if words[0] == "python" else str(bin_ / words[0])
    env = {k: v for k, v in os.environ.items() if not k.startswith("RLK_")} | {"RLK_SPOOL": str(folder / "spool")}
    return subprocess.run(words, cwd=folder, env=env, capture_output=True, text=True, timeout=120, check=False)


def test_the_example_prints_what_the_readme_shows(tmp_path: Path) -> None:
    (tmp_path / "side.py").write_text(block("side.py"))
    last = None
    for command, wanted in session():
        last = run(command, tmp_path)
        printed = [re.sub(r"[\d.]+ KB", "N KB", line) for line in last.stdout.splitlines()]
        assert [re.sub(r"[\d.]+ KB", "N KB", line) for line in wanted if line] == [
            line for line in printed if line in {re.sub(r"[\d.]+ KB", "N KB", w) for w in wanted}
        ], f"{command}: {last.stdout}{last.stderr}"
    assert last is not None
    assert last.returncode == 1


def test_the_command_table_names_every_command_and_nothing_else() -> None:
    help_ = run("rlk-ledger --help", Path.cwd()).stdout
    commands = set(re.findall(r"^  ([a-z]+)  ", help_.split("Commands:")[1], re.MULTILINE))
    table = README.split("## Commands")[1].split("##")[0]
    named = {
        word for cell in re.findall(r"^\| (`.*?`) \|", table, re.MULTILINE) for word in re.findall(r"`([a-z]+)", cell)
    }
    assert named == commands
