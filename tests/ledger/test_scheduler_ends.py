"""How a scheduler ends a job: every process of its control group at once, a /tmp that goes with it, and an epilog."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from waiting import wait_for

from rlk_ledger.verify import verify

RLK = [sys.executable, "-m", "rlk_ledger"]
GROUPS = (Path("/sys/fs/cgroup/unified"), Path("/sys/fs/cgroup"))
JOB = """
import signal, sys, time
import rlk_ledger

def leave(*_):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # of scheduler and supervisor: it comes twice
    sys.exit(7)
signal.signal(signal.SIGTERM, leave)
rlk_ledger.init(run_id="r1", role="training")
for i in range(int(sys.argv[1])):
    rlk_ledger.record("weights.published", weight_version=f"v{i}", digest="sha256:00", tensor_count=1)
print("recorded", flush=True)
while True:
    time.sleep(0.05)
"""


@pytest.fixture
def group() -> Iterator[Path]:
    """A control group of this test's own, as the scheduler makes one for each step."""
    for top in GROUPS:
        folder = top / f"rlk-step-{os.getpid()}"
        try:
            folder.mkdir()
            usable = (folder / "cgroup.kill").exists()
        except OSError:
            continue
        if usable:
            break
        folder.rmdir()
    else:
        pytest.skip("this machine lets nobody make a control group")
    yield folder
    (folder / "cgroup.kill").write_text("1")
    wait_for(lambda: _removed(folder))


def _removed(folder: Path) -> bool:
    """The kernel calls a group busy for a moment after its last process is gone."""
    try:
        folder.rmdir()
    except OSError:
        return False
    return True


def _members(group: Path) -> list[int]:
    return [int(word) for word in (group / "cgroup.procs").read_text().split()]


@pytest.fixture
def environment(spool: Path, url: str) -> dict[str, str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("RLK_", "PYTEST_", "SLURM_"))}
    return clean | {"RLK_LEDGER": url, "RLK_SPOOL": str(spool), "RLK_EXIT_S": "0"}


def step(group: Path, *words: str, environment: dict[str, str]) -> subprocess.Popen[str]:
    """Starts a command inside the group; so is everything it starts, daemons included."""
    script = f'echo $$ > {group}/cgroup.procs; exec "$@"'
    return subprocess.Popen(
        ["sh", "-c", script, "sh", *words], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def _shippers(group: Path) -> list[int]:
    return [pid for pid in _members(group) if b"rlk_ledger.shipper" in _words(pid)]


def _words(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def test_a_killed_step_takes_its_shipper_along_and_the_epilog_saves_what_it_left(
    group: Path, spool: Path, url: str, environment: dict[str, str]
) -> None:
    """proctrack/cgroup: a session of its own saves no daemon. What is on the node's disk is saved by `recover`."""
    job = step(group, sys.executable, "-c", JOB, "50", environment=environment)
    try:
        assert job.stdout.readline() == "recorded\n"
        wait_for(lambda: _shippers(group))
        (group / "cgroup.kill").write_text("1")
        job.communicate(timeout=60)
        wait_for(lambda: not _members(group))
    finally:
        job.kill()
        job.wait()
    epilog = subprocess.run([*RLK, "recover", str(spool), "--json"], capture_output=True, text=True, timeout=60)
    document = json.loads(epilog.stdout)
    assert (epilog.returncode, document["outcome"]) == (0, "saved")
    found = verify(url, deep=True)
    assert (found.exit_code, {f.kind for f in found.findings} - {"receipt.uncovered"}) == (0, {"writer.killed"})
    # What was recorded, the writer's two opening events, and the two of whoever states its end.
    assert found.events == 50 + 2 + 2


def test_a_supervised_step_that_is_told_to_end_all_at_once_commits_before_it_leaves(
    group: Path, spool: Path, url: str, environment: dict[str, str]
) -> None:
    """SIGTERM to the supervisor, the job and the shipper in one sweep, as `scancel` sends it."""
    words = [*RLK, "run", "--grace", "300", "--", sys.executable, "-c", JOB, "50"]
    job = step(group, *words, environment=environment)
    try:
        assert job.stdout.readline() == "recorded\n"
        wait_for(lambda: _shippers(group))
        for pid in _members(group):
            os.kill(pid, signal.SIGTERM)
        _, err = job.communicate(timeout=120)
    finally:
        job.kill()
        job.wait()
    assert (job.returncode, "everything that was recorded is committed" in err) == (7, True), err
    found = verify(url, deep=True)
    assert (found.exit_code, found.events) == (0, 50 + 2 + 1)


def test_a_tmp_of_the_jobs_own_is_told_before_the_job_and_gone_after_it(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    """job_container/tmpfs binds a folder named after the job over /tmp; the namespace ends with the job."""
    mounts = ["unshare", "--mount", "true"]
    if subprocess.run(mounts, capture_output=True, check=False).returncode != 0:
        pytest.skip("this machine lets nobody make a mount namespace")
    base, shown = tmp_path / "container" / "4711" / ".4711", tmp_path / "node-tmp"
    base.mkdir(parents=True)
    shown.mkdir()
    script = f'mount --bind {base} {shown} && exec "$@"'
    words = [*RLK, "doctor", "--spool", str(shown / "rlk"), "--json"]
    asked = subprocess.run(
        ["unshare", "--mount", "sh", "-c", script, "sh", *words],
        env=environment | {"SLURM_JOB_ID": "4711"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    (line,) = [row for row in json.loads(asked.stdout)["checks"] if row["name"] == "spool lifetime"]
    assert (line["state"], "private to this job" in line["text"]) == ("warn", True), line
    assert "outlives the job" in line["advice"]
    assert list(shown.iterdir()) == []
