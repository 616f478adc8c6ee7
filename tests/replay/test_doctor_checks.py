"""What doctor says of replay: an operator that ran is fine, a package that can be imported is only that."""

import sys
from pathlib import Path

import pytest

from rlk_ledger_replay import doctor_checks
from rlk_ledger_replay.arms import ARMS
from rlk_ledger_replay.doctor_checks import checks, kernels, live, reference
from rlk_ledger_replay.scorers.engines import ENGINES


def interpreter(folder: Path, script: str) -> str:
    path = folder / "python"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


def test_torch_is_fine_because_it_multiplied_and_then_all_arms_can_run() -> None:
    torch, arms = reference(sys.executable)
    assert (torch.state, "multiplied on cpu" in torch.text) == ("ok", True)
    assert (arms.state, all(name in arms.text for name in ARMS)) == ("ok", True)


def test_without_torch_the_one_arm_that_is_left_is_named(tmp_path: Path) -> None:
    """The same interpreter without its installed packages."""
    bare = interpreter(tmp_path, f'exec {sys.executable} -I -S "$@"')
    torch, arms = reference(bare)
    assert (torch.state, "No module named 'torch'" in torch.text) == ("note", True)
    assert (arms.state, "only both_native" in arms.text) == ("note", True)


def test_a_device_on_which_the_operator_fails_fails(tmp_path: Path) -> None:
    told = '{"version": "2", "devices": ["cpu"], "failed": {"cuda:0": "AcceleratorError: no kernel image"}}'
    broken = interpreter(tmp_path, f"echo '{told}'")
    found = list(reference(broken))
    assert [(check.name, check.state) for check in found] == [("torch", "fail"), ("torch", "ok"), ("replay arms", "ok")]
    none = interpreter(tmp_path, """echo '{"version": "2", "devices": [], "failed": {"cpu": "illegal instruction"}}'""")
    assert [check.state for check in reference(none)] == ["fail", "fail"]


def test_kernel_backends_are_those_that_ran_a_case() -> None:
    found = kernels(sys.executable)
    assert found.state == "ok", found.text
    assert "on cpu: " in found.text
    assert "torch ran" in found.text
    assert "not here:" in found.text
    assert "flashinfer (it is made for cuda, not for cpu)" in found.text
    assert "flashinfer: pip install flashinfer-python" in str(found.advice)


def test_a_kernel_that_ran_wrong_fails_and_one_that_is_absent_does_not(tmp_path: Path) -> None:
    told = '{"device": "cpu", "found": [["rope", "torch", false, "RuntimeError: no", "", "a case"]]}'
    found = kernels(interpreter(tmp_path, f"echo '{told}'"))
    assert (found.state, found.text) == ("fail", "torch does not run rope on cpu: RuntimeError: no")
    rows = '["rope", "torch", true, "it ran", "", "a case"], ["rope", "x", false, "no", "buy", ""]'
    told = f'{{"device": "cuda", "found": [{rows}]}}'
    found = kernels(interpreter(tmp_path, f"echo '{told}'"))
    assert found.text == "on cuda: torch ran 1 of 1 operators; not here: x (no)"
    assert (found.state, found.advice) == ("ok", "x: buy")


def test_an_engine_that_can_be_imported_is_not_said_to_work() -> None:
    found = live(ENGINES["transformers"], sys.executable)
    assert (found.state, "is importable, not run" in found.text) == ("note", True)
    assert "replay --scorer transformers" in str(found.advice)


def test_an_engine_that_is_not_there_says_how_to_get_it(tmp_path: Path) -> None:
    bare = interpreter(tmp_path, f'exec {sys.executable} -I -S "$@"')
    found = live(ENGINES["vllm"], bare)
    assert (found.state, "No module named 'vllm'" in found.text) == ("note", True)
    assert "pip install vllm" in str(found.advice)
    found = live(ENGINES["vllm"], str(tmp_path / "none"))
    assert (found.state, "cannot be run" in found.text) == ("note", True)


def test_an_import_that_hangs_is_unknown(tmp_path: Path) -> None:
    hanging = interpreter(tmp_path, "exec sleep 60")
    assert live(ENGINES["megatron"], hanging, timeout_s=0.1).state == "unknown"
    assert [check.state for check in reference(hanging, timeout_s=0.1)] == ["unknown", "unknown"]
    assert kernels(hanging, timeout_s=0.1).state == "unknown"


def test_the_interpreters_of_the_environment_are_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bare = interpreter(tmp_path, 'echo "nothing of the kind" >&2; exit 1')
    monkeypatch.setenv("RLK_SCORER_PYTHON", bare)
    found = list(checks())
    assert {check.name for check in found} == {
        *("torch", "replay arms", "kernel backends", "scorer vllm", "scorer megatron", "scorer transformers")
    }
    assert all("nothing of the kind" in check.text or check.name == "replay arms" for check in found)
    monkeypatch.setenv("RLK_SCORER_PYTHON", "no-engine=/bin/true")
    assert [check.state for check in checks()] == ["fail"]


def test_every_live_engine_has_an_import_to_try() -> None:
    assert doctor_checks.IMPORTS.keys() == ENGINES.keys() - {"reference"}
