"""Every system call of the recorder and of the shipper fails, in every way; the wall clock jumps by hours.

The cases and what must hold after each are in `tools/syscall_faults.py`, which runs them in a process of its own with
`tools/syscall_faults.c` preloaded. Here a part of the calls, spread evenly; `--every 1` takes all.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import syscall_faults

pytestmark = pytest.mark.skipif(shutil.which("gcc") is None, reason="gcc compiles the library that makes calls fail")


def run(tmp_path: Path, *arguments: str) -> Any:
    command = [sys.executable, syscall_faults.__file__, *arguments, "--dir", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout)


def test_the_recorder_keeps_what_it_returned_for_and_states_the_rest(tmp_path: Path) -> None:
    for method, done in run(tmp_path, "recorder", "--every", "6").items():
        assert done["cases"] > 30, method
        assert done["faults"] > done["cases"], "most faults last until the disk heals"


@pytest.mark.slow
def test_the_shipper_ships_everything_once_when_the_disk_works_again(tmp_path: Path) -> None:
    done = run(tmp_path, "shipper", "--every", "40")
    assert done["calls"] > 100
    assert done["faults"] > done["cases"] > 30


def test_a_clock_that_jumps_changes_no_order_and_loses_nothing(tmp_path: Path) -> None:
    assert run(tmp_path, "clock")["steps_back"] > 20


BROKEN = """
import os, sys
from pathlib import Path
import syscall_faults as faults
from rlk_ledger_sdk import spool

def write(file, offset, data):
    os.pwrite(file.fd, data, offset)

spool.SpoolWriter._write = staticmethod(write)
short = [fault for fault in faults.FAULTS if fault.name == "short writes"]
try:
    faults.sweep(faults.Recording(faults.Library(), Path(sys.argv[1]) / "case", "pwrite"), 1, tuple(short))
except (AssertionError, Exception) as error:
    print(f"noticed: {type(error).__name__}")
"""


def test_the_check_notices_a_recorder_that_believes_a_short_write(tmp_path: Path) -> None:
    """The guard of the first test, broken on purpose."""
    library = tmp_path / "faults.so"
    source = str(syscall_faults.SOURCE)
    subprocess.run(["gcc", "-shared", "-fPIC", "-O1", "-o", str(library), source, "-ldl"], check=True)
    tools = str(Path(syscall_faults.__file__).parent)
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("RLK_", "PYTEST_"))}
    environment |= {"LD_PRELOAD": str(library), "PYTHONPATH": tools}
    command = [sys.executable, "-c", BROKEN, str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert "noticed: " in done.stdout, done.stdout + done.stderr
