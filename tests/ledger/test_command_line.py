"""The commands: one sentence on errors, one document with --json, exit codes as documented."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rlk_ledger import cli, terminal
from rlk_ledger.build import build, event
from rlk_ledger.chain import Ending
from rlk_ledger.commands.audit import short

RUN, A, B = "r1", "0a" * 16, "0b" * 16


@pytest.fixture
def ledger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    url = str(tmp_path / "ledger")
    sample = {"sample_id": "s", "response_token_ids": [1, 2, 3], "loss_mask": [1, 0, 1]}
    opened = {"role": "rollout", "rank": 0, "world_size": 1, "engine": {"name": "vllm"}}
    records = [
        event(RUN, A, 0, "writer.opened", **opened),
        event(RUN, A, 1, "rollout.sample", step=4, **sample),
        event(RUN, A, 2, "writer.closed", reason="done"),
    ]
    build(url, RUN, records, roles={"rollout": 1})
    monkeypatch.delenv("RLK_LEDGER", raising=False)
    return url


def run(capsys: pytest.CaptureFixture, *arguments: str) -> tuple[int, str, str]:
    code = cli.main(list(arguments))
    out = capsys.readouterr()
    return code, out.out, out.err


def test_help_lists_every_command_with_its_line_and_imports_none_of_them() -> None:
    code = (
        "import sys\nfrom rlk_ledger import cli\n"
        "assert cli.main(['--help']) == 0\n"
        "heavy = {'numpy', 'pyarrow', 'duckdb', 'fsspec', 'torch', 'rich'} & set(sys.modules)\n"
        "heavy |= {name for name in sys.modules if name.startswith('rlk_ledger.commands.')}\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    for name in ("runs", "show", "verify", "ship", "recover"):
        assert cli.summary(name), f"{name} has no docstring"
        line = next(line for line in done.stdout.splitlines() if line.split()[:1] == [name])
        assert cli.summary(name)[:20] in line


def test_a_damaged_run_hides_no_other_and_is_not_hidden(capsys, ledger: str) -> None:
    build(ledger, "r2", [event("r2", B, 0, "writer.closed", reason="done")])
    (Path(ledger) / "runs" / RUN / "run.json").unlink()
    code, out, _ = run(capsys, "runs", "--ledger", ledger)
    assert code == 1
    assert ["r1", "damaged"] in [line.split() for line in out.splitlines()]
    assert "r2" in out
    assert "run.json is gone; `rlk-ledger verify r1` says" in out
    code, out, _ = run(capsys, "runs", "--json", "--ledger", ledger)
    assert code == 1
    assert ["error" in r for r in json.loads(out)["runs"]] == [True, False]
    code, out, err = run(capsys, "query", "select count(*) from events", "--ledger", ledger)
    assert (code, out) == (2, "")
    assert "run.json is gone" in err, "a run that lost its record does not vanish from answers"


def test_runs_and_show_say_what_is_there(capsys, ledger: str) -> None:
    code, out, err = run(capsys, "runs", "--ledger", ledger)
    assert (code, err) == (0, "")
    assert all(word in out for word in ("r1", "rollout x1", "closed"))
    code, out, _ = run(capsys, "show", RUN, "--ledger", ledger)
    assert code == 0
    assert "3 response tokens, 2 in the loss" in out
    assert "vllm" in out
    assert "\x1b[" not in out, "no colour in a pipe"
    code, out, _ = run(capsys, "show", RUN, "--ledger", ledger, "--json")
    document = json.loads(out)
    assert (document["tokens"], document["active_tokens"], document["events"]) == (3, 2, 3)
    assert document["writer_list"][0]["state"] == "closed"
    code, out, _ = run(capsys, "runs", "--json", "--ledger", ledger)
    assert [r["run_id"] for r in json.loads(out)["runs"]] == [RUN]


def test_the_ledger_comes_from_the_environment_too(capsys, ledger: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLK_LEDGER", ledger)
    assert run(capsys, "verify", RUN, "--deep")[0] == 0


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["runs"], "which ledger? Give --ledger URL or set RLK_LEDGER."),
        (["runs", "--ledger", "/nowhere"], "no ledger at /nowhere"),
        (["runs", "--ledger", "bogus://x"], "use a path, file://, s3://"),
        (["show", "--ledger", "LEDGER"], "Missing argument 'RUN'"),
        (["show", "none", "--ledger", "LEDGER"], "no run 'none'"),
        (["show", "../etc", "--ledger", "LEDGER"], "is not a name"),
        (["verify", "none", "--ledger", "LEDGER"], "no run 'none'"),
        (["vrify"], "did you mean `verify`?"),
        (["verify", "--dep"], "No such option"),
        (["prune", "r1", "--before-step", "x"], "'x' is not a whole number."),
        (["seal", "r1", "more"], "(more). `rlk-ledger seal --help` says how."),
        (["recover", "/nowhere"], "/nowhere is not a directory"),
        (["ship", "--until-idle", "--spool", "/nowhere"], "/nowhere is not a directory"),
    ],
)
def test_a_mistake_is_one_sentence_and_exit_2(capsys, ledger: str, arguments: list[str], says: str) -> None:
    code, out, err = run(capsys, *[ledger if a == "LEDGER" else a for a in arguments])
    assert code == 2
    assert out == ""
    assert says in err
    assert err.startswith("rlk-ledger: ")
    assert "Traceback" not in err


@pytest.mark.parametrize("command", ["show", "verify"])
def test_debug_shows_the_traceback_and_the_exit_code_is_the_same(capsys, ledger: str, command: str) -> None:
    """Python's own exit code for an error is 1, which would say that the ledger was tampered with."""
    code, _, err = run(capsys, command, "none", "--ledger", ledger, "--debug")
    assert code == 2
    assert "Traceback" in err
    assert "LedgerError" in err
    assert err.splitlines()[-1].startswith("rlk-ledger: no run 'none'")


def test_verify_exits_0_1_and_3_and_names_the_place(capsys, ledger: str) -> None:
    code, out, _ = run(capsys, "verify", "--ledger", ledger)
    assert code == 0
    assert out.startswith("intact: ")
    build(ledger, "r2", [event("r2", B, 0, "writer.closed", reason="x")], endings={A: Ending(9)})
    code, out, _ = run(capsys, "verify", "r2", "--ledger", ledger)
    assert code == 3
    assert "GAP  bytes.lost" in out
    segment = next(Path(ledger, "runs", RUN, "segment").rglob("*.parquet"))
    data = bytearray(segment.read_bytes())
    data[len(data) // 2] ^= 1
    segment.write_bytes(data)
    code, out, _ = run(capsys, "verify", RUN, "--ledger", ledger)
    assert code == 1
    assert f"ERROR  segment.changed  {segment.relative_to(ledger)}" in out
    assert A in out
    assert "next: leave the ledger as it is" in out
    code, out, _ = run(capsys, "verify", RUN, "--ledger", ledger, "--json")
    document = json.loads(out)
    assert (code, document["exit_code"], document["verdict"]) == (1, 1, "tampered")
    assert document["findings"][0]["kind"] == "segment.changed"
    segment.unlink()
    assert "1 segment (1 of them missing)" in run(capsys, "verify", RUN, "--ledger", ledger)[1], (
        "not counted as checked"
    )


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("s3:/bucket/x", "lacks a slash; write 's3://bucket/x'"),
        ("s3://", "names no bucket"),
        ("gs:///x", "names no bucket"),
        ("https://s3.internal/bucket/x", "AWS_ENDPOINT_URL"),
    ],
)
def test_a_mistyped_url_is_said_before_anything_is_contacted(capsys, url: str, says: str) -> None:
    code, _, err = run(capsys, "runs", "--ledger", url)
    assert code == 2
    assert says in err


def test_recover_prints_an_exact_statement_and_exits_0_or_3(capsys, new_writer, spool: Path, url: str) -> None:
    writer = new_writer(dead=True)
    writer.many(3)
    code, out, _ = run(capsys, "recover", str(spool))
    assert code == 0
    assert "3 whole events in the spool: 3 shipped now, 0 were in the ledger; nothing was lost." in out
    torn = new_writer(dead=True)
    torn.many(2)
    at = torn.spool.at[0]
    torn.spool._map[at + 8 : at + 12] = b"torn"
    code, out, _ = run(capsys, "recover", str(spool), "--json")
    document = json.loads(out)
    assert code == document["exit_code"] == 3
    assert [(w["shipped"], w["lost_bytes"], w["state"]) for w in document["writers"]] == [(2, 12, "dead")]
    code, out, _ = run(capsys, "recover", str(spool))
    assert code == 0
    assert "nothing to recover" in out


def test_recover_into_a_bucket_that_refuses_keeps_the_spool_and_exits_1(capsys, new_writer, spool: Path) -> None:
    writer = new_writer(dead=True, url="bogus://x")
    writer.many(2)
    code, out, _ = run(capsys, "recover", str(spool))
    assert code == 1
    assert "2 wait in the spool" in out
    assert list(writer.directory.glob("*.spool"))


def test_recover_can_send_the_events_elsewhere(capsys, new_writer, spool: Path, tmp_path: Path) -> None:
    new_writer(dead=True, url="bogus://x").many(2)
    other = str(tmp_path / "other")
    assert run(capsys, "recover", str(spool), "--ledger", other)[0] == 0
    assert run(capsys, "verify", "--deep", "--ledger", other)[0] == 0


def test_ship_until_idle_ships_what_dead_writers_left(capsys, new_writer, spool: Path, url: str, monkeypatch) -> None:
    from rlk_ledger import service

    monkeypatch.setattr(service.serve, "__defaults__", (None, 0.0, lambda error: None, 0.0, None))
    new_writer(dead=True).many(2)
    code, out, _ = run(capsys, "ship", "--spool", str(spool), "--until-idle", "--json")
    assert code == 0
    assert json.loads(out)["exit_code"] == 0
    assert run(capsys, "verify", "--ledger", url)[0] == 0


def test_ship_serves_a_spool_on_a_network_file_system_that_is_asked_for_by_name(
    capsys, new_writer, spool: Path, url: str, monkeypatch
) -> None:
    from rlk_ledger import service

    monkeypatch.setattr(service.serve, "__defaults__", (None, 0.0, lambda error: None, 0.0, None))
    new_writer(dead=True).many(2)
    monkeypatch.setenv("RLK_SPOOL", f"nfs:{spool}")
    monkeypatch.chdir(spool.parent)
    assert run(capsys, "ship", "--until-idle", "--json")[0] == 0
    assert run(capsys, "runs", "--ledger", url)[0] == 0, "what init() calls by this name is what ship serves"


def test_a_closed_pipe_is_quiet(ledger: str) -> None:
    arguments = ["show", "r1", "--ledger", ledger, "--json"]
    code = f"import sys; from rlk_ledger import cli; sys.exit(cli.main({arguments!r}))"
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run([sys.executable, "-c", code], stdout=write, stderr=subprocess.PIPE, check=False)
    os.close(write)
    assert done.returncode == 141
    assert done.stderr == b""


def test_text_wraps_at_a_narrow_terminal(ledger: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import pty

    pid, fd = pty.fork()
    if pid == 0:
        os.environ.update(COLUMNS="50", TERM="xterm", RLK_LEDGER=ledger)
        os.execv(sys.executable, [sys.executable, "-c", "from rlk_ledger import cli; cli.main(['show', 'r1'])"])
    shown = b""
    while True:
        try:
            block = os.read(fd, 4096)
        except OSError:
            break
        if not block:
            break
        shown += block
    os.waitpid(pid, 0)
    os.close(fd)
    import re

    lines = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown.decode()).splitlines()
    assert any("response tokens" in line or "response" in line for line in lines)
    assert max(map(len, lines)) <= 50


def test_ship_says_once_what_is_in_its_way(capsys, new_writer, spool: Path, tmp_path: Path, monkeypatch) -> None:
    from rlk_ledger import outbox, service

    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setattr(service, "GIVE_UP", 3)
    monkeypatch.setattr(outbox, "_FIRST_BACKOFF_S", 0.01)
    new_writer(url=str(tmp_path / "file"), dead=True).many(2)
    code, out, err = run(capsys, "ship", "--spool", str(spool), "--until-idle")
    assert code == 1
    assert err.count("waiting: ") == 1
    assert str(tmp_path / "file") in err
    assert f"The events are safe in {spool}" in " ".join(out.split())


def test_ship_says_when_another_shipper_serves(capsys, spool: Path) -> None:
    from rlk_ledger.service import elected

    with elected(spool):
        code, out, _ = run(capsys, "ship", "--spool", str(spool))
    assert code == 0
    assert "another shipper serves" in out


def test_a_table_that_a_narrow_terminal_would_shred_becomes_paragraphs(
    capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rich.console import Console

    headers, rows = (
        ("run", "roles", "state"),
        [("demo", "rollout x1, training x1", ""), ("other", "rollout x8", "open")],
    )
    for width, wanted in ((30, "run: demo\nroles: rollout x1, training x1\n\nrun: other\n"), (60, "run     roles")):
        monkeypatch.setattr(terminal, "console", lambda width=width: Console(width=width, color_system=None))
        terminal.table(headers, rows)
        assert capsys.readouterr().out.startswith(wanted)


def test_many_alike_findings_are_counted_after_the_first_few(capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    gaps = [
        event(RUN, A, n, "gap", kind="rejected", first=n - 1, last=n - 1, reason="unknown event type")
        for n in (2, 4, 6, 8, 10)
    ]
    opened = event(RUN, A, 0, "writer.opened", role="rollout", rank=0, world_size=1)
    build(str(tmp_path), RUN, [opened, *gaps, event(RUN, A, 11, "writer.closed", reason="done")], roles={"rollout": 1})
    code, out, _ = run(capsys, "verify", "--ledger", str(tmp_path))
    assert code == 3
    assert out.count("GAP  seqs.dropped") == 3
    assert "and 2 more seqs.dropped of the same" in out
    _, document, _ = run(capsys, "verify", "--ledger", str(tmp_path), "--json")
    assert len(json.loads(document)["findings"]) == 5


def _shell(line: str, ledger: str) -> "subprocess.CompletedProcess[str]":
    environment = {**os.environ, "RLK": f"{sys.executable} -m rlk_ledger", "L": ledger}
    return subprocess.run(["bash", "-c", line], capture_output=True, text=True, env=environment, check=False)


@pytest.mark.parametrize("command", ["show r1", "verify", "runs"])
def test_a_closed_pipe_is_no_finding(ledger: str, command: str) -> None:
    """`| head -1` may end a command early; exit code 1 would say that something is wrong with the run."""
    done = _shell(f"$RLK {command} --ledger $L | head -c 1 > /dev/null; exit ${{PIPESTATUS[0]}}", ledger)
    assert (done.returncode in (0, 141), done.stderr) == (True, "")


def test_without_a_standard_output_the_exit_code_still_answers(ledger: str) -> None:
    for closed in (">&-", "2>&-", ">&- 2>&-"):
        done = _shell(f"$RLK verify --ledger $L {closed}", ledger)
        assert (done.returncode, done.stderr) == (0, "")


def test_output_that_cannot_be_written_is_one_sentence(ledger: str) -> None:
    for command in ("show r1", "runs --json"):
        done = _shell(f"$RLK {command} --ledger $L > /dev/full", ledger)
        assert done.returncode == 2
        assert done.stderr == (
            "rlk-ledger: the output cannot be written (No space left on device); send it elsewhere.\n"
        )


def test_what_to_run_next_names_the_ledger_where_only_this_call_did(capsys, ledger: str, monkeypatch) -> None:
    _, out, _ = run(capsys, "drift", RUN, "--ledger", ledger)
    assert f"`rlk-ledger audit {RUN} --ledger {ledger}` says why" in out
    monkeypatch.setenv("RLK_LEDGER", ledger)
    _, out, _ = run(capsys, "drift", RUN)
    assert f"`rlk-ledger audit {RUN}` says why" in out


def test_drift_of_nothing_could_not_be_known(capsys, ledger: str) -> None:
    assert run(capsys, "drift", RUN, "--ledger", ledger)[0] == 3
    assert run(capsys, "drift", RUN, "--ledger", ledger, "--json")[0] == 3


def test_counts_of_one_are_singular(capsys, ledger: str) -> None:
    assert "3 events in 1 segment (" in run(capsys, "show", RUN, "--ledger", ledger)[1]


@pytest.mark.parametrize(
    "arguments", [["show"], ["verify", "a", "b"], ["verify", "--dep"], ["hold", "r1", "--release"]]
)
def test_a_mistyped_call_says_where_the_usage_is(capsys, ledger: str, arguments: list[str]) -> None:
    _, _, err = run(capsys, *arguments)
    assert err.endswith(f"`rlk-ledger {arguments[0]} --help` says how.\n")


def test_a_digest_is_shortened_and_a_sentence_is_not() -> None:
    sentence = "a side does not say which weights it computed with, so nothing says whether the two used the same"
    assert short(sentence) == sentence
    assert short("sha256:" + "0a" * 32) == "sha256:0a0a0a0a0a0a..."
    assert short("x" * 200) == "x" * 32 + "..."
