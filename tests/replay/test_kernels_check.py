"""Claims: `kernels check` ends with one summary line, its exit code says what was found, and its certificate is an
event of a run; a broken operator fails it, and what was named but cannot run is never a pass."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import struct
import subprocess
import sys
import termios
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rlk_ledger.cli import main
from rlk_ledger.ledger import open_ledger
from rlk_ledger.verify import verify
from rlk_ledger_kernels.ops.swiglu import cases as swiglu_cases
from rlk_ledger_kernels.ops.swiglu import torch as swiglu_torch
from rlk_ledger_kernels.ops.swiglu.contract import SwigluContract
from rlk_ledger_kernels.suite import certificate as certificate_module
from rlk_ledger_kernels.suite import golden
from rlk_ledger_kernels.suite.mistakes import mistakes
from rlk_ledger_schemas import tolerances
from rlk_ledger_schemas.events import check_fields

COMMAND = [str(Path(sys.executable).parent / "rlk-ledger"), "kernels", "check"]
Check = Callable[..., tuple[int, str, str]]
ONE = ["--operator", "swiglu", "--backend", "torch", "--device", "cpu"]
CHEAP = ["--operator", "embedding", *ONE[2:]]


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in os.environ.items() if not k.startswith(("RLK_", "TRITON_"))} | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [*COMMAND, *arguments], env=env | environment, capture_output=True, text=True, timeout=200, check=False
    )


@pytest.fixture
def check(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Check:
    """The command in this process, where what it checks can be broken: (exit code, stdout, stderr).

    On one narrow shape, of which nobody recorded bits, and with two of the wrong operators.
    """
    for name in ("TRITON_INTERPRET", "RLK_LEDGER"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setitem(swiglu_cases._SHAPES, "small", ((130, 17),))
    monkeypatch.setattr(golden, "RECORDED", tmp_path / "recorded")
    two = mistakes()[:2]
    monkeypatch.setattr(certificate_module, "mistakes", lambda: two)

    def call(*arguments: str) -> tuple[int, str, str]:
        code = main(["kernels", "check", *arguments])
        return code, *capsys.readouterr()

    return call


def certificate(url: Path, run_id: str) -> dict[str, Any]:
    (found,) = [fields for _, _, fields, _ in open_ledger(str(url)).read_events(run_id, types=["kernels.certified"])]
    return found


def test_a_check_passes_records_its_certificate_and_ends_with_one_summary_line(tmp_path: Path) -> None:
    done = run(*ONE, "--ledger", str(tmp_path / "ledger"), "--run-id", "device-7")
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert [line for line in lines if line.startswith("kernels check: ")] == [lines[-1]]
    assert lines[-1].startswith("kernels check: pass: 1 operator (torch) on cpu, ")
    assert "\x1b" not in done.stdout
    written = certificate(tmp_path / "ledger", "device-7")
    shipped = len(mistakes())
    assert (written["verdict"], written["device"], written["transforms"]) == (
        "pass",
        "cpu",
        ["T1", "T2", "T3", "T4", "T5", "T6", "T7"],
    )
    assert written["wrong_caught"] == written["wrong_shipped"] >= shipped
    assert written["tolerance_version"] == tolerances.VERSION
    (swiglu,) = written["operators"]
    assert (swiglu["operator"], swiglu["backend"], swiglu["invariance"]["outcome"]) == ("swiglu", "torch", "passed")
    assert swiglu["source"].startswith("sha256:")
    assert 0.0 < swiglu["accuracy"]["share"] <= 1.0
    assert len(swiglu["golden"]) == swiglu["cases"]
    assert written["build"]["torch"] == str(torch.__version__)
    assert verify(open_ledger(str(tmp_path / "ledger")), "device-7").exit_code == 0


def test_the_json_document_is_the_event_with_what_became_of_it(tmp_path: Path, check: Check) -> None:
    code, out, _ = check(*ONE, "--json", "--ledger", str(tmp_path / "ledger"))
    document = json.loads(out)
    assert (code, document["exit_code"], document["not_recorded"]) == (0, 0, None)
    told = {k: v for k, v in document.items() if k not in ("exit_code", "run_id", "not_recorded")}
    check_fields("kernels.certified", told)
    written = certificate(tmp_path / "ledger", document["run_id"])
    kept = ("operators", "verdict", "device_class")
    assert {k: written[k] for k in kept} == {k: told[k] for k in kept}


def test_without_a_ledger_nothing_is_recorded_unless_that_was_asked_for(tmp_path: Path, check: Check) -> None:
    assert json.loads(check(*ONE, "--json")[1])["not_recorded"] == "recording was not asked for"
    for asked in (["--record"], ["--run-id", "r1"]):
        code, _, sentence = check(*ONE, *asked)
        assert (code, "which ledger?" in sentence) == (2, True)
    code, _, _ = check(*ONE, "--no-record", "--ledger", str(tmp_path / "ledger"))
    assert (code, (tmp_path / "ledger").exists()) == (0, False)


def test_a_backend_named_that_cannot_run_is_a_gap_and_says_what_would_enable_it(check: Check) -> None:
    code, out, _ = check("--operator", "swiglu", "--backend", "triton", "--device", "cpu")
    assert code == 3
    assert "triton not measured (swiglu): Triton has no CPU backend; set TRITON_INTERPRET=1" in out
    assert out.splitlines()[-1].startswith("kernels check: inconclusive: ")
    code, out, _ = check("--operator", "swiglu", "--device", "cpu")
    assert (code, "triton not measured (swiglu)" in out) == (0, True)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize("named", [(), ("--backend", "torch")], ids=["any backend", "one backend"])
def test_a_device_that_is_not_here_is_a_gap(named: tuple[str, ...], check: Check) -> None:
    code, out, sentence = check("--operator", "swiglu", "--device", "cuda", *named)
    assert (code, sentence) == (3, "")
    assert "torch sees no" in out
    assert out.splitlines()[-1].startswith("kernels check: inconclusive: 0 operators (no backend) on cuda, ")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--operator", "conv"], "operator 'conv' does not exist; known are embedding, "),
        (["--operator", "swiglu", "--backend", "cudnn"], "no operator chosen has a backend 'cudnn'; they have "),
        (["--interpret", "--device", "cuda"], "--interpret runs Triton kernels on the CPU"),
        (["--size", "huge"], "'huge' is not one of 'small', 'large'"),
    ],
)
def test_a_name_that_does_not_exist_is_a_usage_error(arguments: list[str], sentence: str, check: Check) -> None:
    code, _, told = check(*arguments)
    assert (code, sentence in told, len(told.splitlines())) == (2, True, 1)


def test_triton_runs_in_its_interpreter_when_asked() -> None:
    done = run("--operator", "embedding", "--backend", "triton", "--interpret", "--json")
    (triton,) = json.loads(done.stdout)["operators"]
    assert (done.returncode, done.stderr) == (0, "")
    assert (triton["backend"], triton["invariance"]["outcome"]) == ("triton", "passed")
    assert "in Triton's interpreter" in triton["invariance"]["detail"]


def test_an_operator_that_breaks_its_promise_fails_the_check(monkeypatch: pytest.MonkeyPatch, check: Check) -> None:
    right = swiglu_torch.swiglu

    def wrong(gate: torch.Tensor, up: torch.Tensor, contract: SwigluContract) -> torch.Tensor:
        out = right(gate, up, contract)
        return out if len(gate) > 3 else out + 1e-3

    monkeypatch.setattr(swiglu_torch, "swiglu", wrong)
    code, out, _ = check(*ONE)
    assert code == 1
    assert "swiglu (torch), invariance: swiglu (" in out
    assert "changed under T1 population 1: row 0, element 0" in out
    assert out.splitlines()[-1].endswith("; swiglu (torch) fails invariance")


def test_an_operator_far_from_its_reference_fails_the_check(monkeypatch: pytest.MonkeyPatch, check: Check) -> None:
    right = swiglu_torch.swiglu
    monkeypatch.setattr(swiglu_torch, "swiglu", lambda gate, up, contract: right(gate, up, contract) * 1.5)
    code, out, _ = check(*ONE, "--json")
    (found,) = json.loads(out)["operators"]
    assert (code, json.loads(out)["verdict"]) == (1, "fail")
    assert (found["accuracy"]["outcome"], found["accuracy"]["share"] > 1.0) == ("failed", True)


def test_other_bits_than_the_recorded_ones_fail_and_name_the_operator(
    monkeypatch: pytest.MonkeyPatch, check: Check
) -> None:
    code, out, _ = check(*ONE, "--json")
    (measured,), name = json.loads(out)["operators"], json.loads(out)["device_class"]
    assert (code, measured["recorded_bits"]["outcome"]) == (0, "not_recorded")
    golden.save(name, {"swiglu": {"torch": measured["golden"]}})
    code, out, _ = check(*ONE, "--json")
    assert (code, json.loads(out)["operators"][0]["recorded_bits"]["outcome"]) == (0, "passed")
    right = swiglu_torch.swiglu
    # One unit in the last place: well within every tolerance, and not the recorded bits.
    monkeypatch.setattr(swiglu_torch, "swiglu", lambda *operands: right(*operands).mul(1.0 + 2.0**-23))
    code, out, _ = check(*ONE)
    assert code == 1
    assert "swiglu (torch), golden bits: swiglu, " in out
    assert f"the bits are not those recorded for {name}" in out


def test_a_terminal_of_sixty_columns_shows_lines_that_fit_and_no_table() -> None:
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 60, 0, 0))
    env = {k: v for k, v in os.environ.items() if not k.startswith(("RLK_", "TRITON_", "COLUMNS"))}
    child = subprocess.Popen([*COMMAND, *CHEAP], env=env, stdout=slave, stderr=subprocess.DEVNULL)
    os.close(slave)
    out = b""
    while True:
        try:
            part = os.read(master, 4096)
        except OSError:  # the other end is closed
            break
        if not part:
            break
        out += part
    os.close(master)
    assert child.wait(timeout=100) == 0
    lines = out.decode().replace("\r", "").replace("\x1b[2m", "").replace("\x1b[0m", "").splitlines()
    assert lines[0].startswith("embedding (torch): invariance ok, backward ")
    assert all(len(line) <= 60 for line in lines[:-1])
    assert lines[-1].startswith("kernels check: pass: ")
