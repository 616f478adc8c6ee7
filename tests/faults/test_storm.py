"""A small storm of kills from `tools/storm.py`: producers, shippers, `recover`, checkpoint makers. Bigger by hand."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import storm

STORM = """
import sys
from pathlib import Path
import storm
nursery = storm.Nursery()
done = storm.rounds(Path(sys.argv[1]), int(sys.argv[2]), 11, int(sys.argv[2]), nursery)
nursery.close()
print(done.total(), sorted(done))
"""


def run(code: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """A storm in a process of its own: its nursery must fork from a process without threads."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("RLK_", "PYTEST_"))}
    environment |= {"PYTHONPATH": str(Path(storm.__file__).parent), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_a_storm_of_kills_loses_nothing_acknowledged_and_doubles_nothing(tmp_path: Path) -> None:
    done = run(STORM, str(tmp_path), os.environ.get("RLK_TEST_KILLS", "40"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "'checkpoint', 'producer', 'recover', 'shipper'" in done.stdout


SMALL = """
import os, struct, sys
from pathlib import Path
import rlk_ledger
where = Path(sys.argv[1])
rlk_ledger.init(str(where / "ledger"), run_id="storm", spool=where / "spool", shipper="off")
acks = b""
for n in range(5):
    reference = rlk_ledger.record("knob.applied", path="p", requested=n, status="applied")
    acks += struct.pack("<Q", reference.seq + 1) + bytes.fromhex(reference.writer_id)
(where / "p0.acks").write_bytes(acks)
os._exit(0)
"""


def test_the_check_notices_an_acknowledged_event_that_is_gone(tmp_path: Path) -> None:
    """The guard, broken on purpose: somebody acknowledges an event that was never recorded, or one twice."""
    done = run(SMALL, str(tmp_path))
    assert done.returncode == 0, done.stderr
    scene = storm.Scene(tmp_path, str(tmp_path / "ledger"), {})
    assert storm.check(scene).startswith("5 acknowledged, 9 in the ledger, 2 writers")
    acks = (tmp_path / "p0.acks").read_bytes()
    (tmp_path / "liar.acks").write_bytes((1 << 40).to_bytes(8, "little") + acks[8:24])
    with pytest.raises(AssertionError, match="acknowledged and lost"):
        storm.check(scene)
    (tmp_path / "liar.acks").write_bytes(acks[:24])
    with pytest.raises(AssertionError, match="one number twice"):
        storm.check(scene)
