"""A user who has what the README's policy gives, and nothing else: a job runs, nothing is deleted or put elsewhere."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from store_servers import SeaweedFS

from rlk_ledger.contact import meet
from rlk_ledger.store import Store, open_store
from rlk_ledger_schemas.errors import StoreError
from rlk_ledger_schemas.objects import RunInfo

PREFIX = "team/rl"
JOB = """
import sys
import rlk_ledger

rlk_ledger.init(sys.argv[1], run_id="r1", role="training", roles={"training": 1})
for i in range(20):
    rlk_ledger.record("weights.published", weight_version=f"v{i}", digest="sha256:00", tensor_count=i)
print(rlk_ledger.flush("committed", timeout=float(sys.argv[2])))
"""


@pytest.fixture
def user(seaweedfs: SeaweedFS, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    """The name of the user whose credentials the environment holds."""
    name: str = getattr(request, "param", "job")
    for variable, value in seaweedfs.environ_of(f"{name}-key", f"{name}-secret").items():
        monkeypatch.setenv(variable, value)
    return name


def _job(url: str, spool: Path, flush_s: float) -> subprocess.CompletedProcess[str]:
    script = spool.parent / "job.py"
    script.write_text(JOB)
    environ = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
    environ |= {"RLK_SPOOL": str(spool), "RLK_EXIT_S": "1"}
    command = [sys.executable, str(script), url, str(flush_s)]
    return subprocess.run(command, env=environ, text=True, capture_output=True)


def test_the_policy_of_the_readme_is_enough_for_a_job_and_for_verify(
    user: str, seaweedfs: SeaweedFS, name: str, spool
) -> None:
    url = seaweedfs.url(f"{PREFIX}/{name}")
    done = _job(url, spool, 60)
    assert done.returncode == 0, done.stderr
    program = str(Path(sys.executable).with_name("rlk-ledger"))
    for command in (["verify", "--deep"], ["runs"], ["query", "select count(*) from weights"]):
        read = subprocess.run([program, *command, "--ledger", url], text=True, capture_output=True)
        assert read.returncode == 0, read.stdout + read.stderr


def test_it_deletes_nothing_and_puts_and_reads_nothing_elsewhere(user: str, seaweedfs: SeaweedFS, name: str) -> None:
    inside = open_store(seaweedfs.url(f"{PREFIX}/{name}"))
    inside.create("x", b"1")
    with pytest.raises(StoreError, match=r"cannot delete .*need s3:DeleteObject"):
        inside.delete("x")
    assert inside.read("x") == b"1"
    outside = open_store(seaweedfs.url(name))
    with pytest.raises(StoreError, match=r"cannot create .*need s3:PutObject"):
        outside.create("x", b"1")
    with pytest.raises(StoreError, match=r"cannot read .*need s3:GetObject"):
        outside.read("x")
    with pytest.raises(StoreError, match=r"cannot list .*need s3:ListBucket"):
        outside.children("")


def _declared() -> RunInfo:
    return RunInfo(format=1, ledger_id="", run_id="r", roles={}, mode={}, redaction="none", created_us=1)


def _use(store: Store) -> None:
    meet(store, _declared())
    store.children("runs/r/receipt")


@pytest.mark.parametrize("user", ["no-GetObject", "no-PutObject", "no-ListBucket"], indirect=True)
def test_a_right_that_is_missing_is_named_in_one_sentence(
    user: str, seaweedfs: SeaweedFS, name: str, spool: Path
) -> None:
    url = seaweedfs.url(f"{PREFIX}/{name}")
    with pytest.raises(StoreError) as caught:
        _use(open_store(url))
    said = str(caught.value)
    assert f"need s3:{user.removeprefix('no-')}" in said
    assert "\n" not in said
    told = _job(url, spool, 8)
    assert told.returncode != 0
    assert f"need s3:{user.removeprefix('no-')}" in told.stderr, "the job's flush says which right is missing"
