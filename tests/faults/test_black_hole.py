"""A bucket that takes every call and answers none: jobs and shippers end when they are told to, events stay."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from chaos_proxy import ChaosProxy
from store_servers import SeaweedFS
from waiting import wait_for

import rlk_ledger
from rlk_ledger.recover import recover
from rlk_ledger.verify import verify
from rlk_ledger_sdk.status import lock_is_free

pytest.importorskip("s3fs")

JOB = """
import sys, rlk_ledger
rlk_ledger.init(sys.argv[1], run_id="r1", spool=sys.argv[2], on_error="raise")
for n in range(50):
    rlk_ledger.record("knob.applied", path="p", requested=n, status="applied")
try:
    rlk_ledger.flush("committed", timeout=1)
except rlk_ledger.errors.FlushTimeout as error:
    print("waited:", error)
"""


@pytest.fixture
def bucket(tmp_path: Path) -> Iterator[tuple[SeaweedFS, ChaosProxy]]:
    with SeaweedFS(tmp_path / "server") as server, ChaosProxy(server.port) as proxy:
        yield server, proxy


@pytest.mark.slow
def test_a_job_and_a_shipper_leave_a_bucket_that_never_answers(
    bucket: tuple[SeaweedFS, ChaosProxy], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job's exit waits RLK_EXIT_S and no longer, the shipper obeys SIGTERM, `recover` finds every event."""
    server, proxy = bucket
    spool, url = tmp_path / "spool", server.url("hole")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("RLK_", "PYTEST_", "AWS_"))}
    environment |= {**server.environ, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{proxy.port}", "RLK_EXIT_S": "1"}
    proxy.mood = "black-hole"
    command = [sys.executable, "-c", JOB, url, str(spool)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "waited: flush: 52 events" in done.stdout
    assert "safe in the spool" in done.stderr
    wait_for(lambda: proxy.fates["hole"])
    pid = int((spool / "shipper.lock").read_text().split()[0])
    assert not lock_is_free(spool), "the shipper is still at it"
    os.kill(pid, signal.SIGTERM)
    wait_for(lambda: lock_is_free(spool))
    wait_for(lambda: not Path(f"/proc/{pid}").exists())
    proxy.mood = "calm"
    for name, value in environment.items():
        if name.startswith("AWS_"):
            monkeypatch.setenv(name, value)
    (saved,) = recover(spool)
    assert (saved.state, saved.events, saved.waiting, saved.lost_bytes) == ("closed", 53, 0, 0)
    events = [e for _, _, e, _ in rlk_ledger.open(url).read_events("r1", {"knob.applied"})]
    assert sorted(e["requested"] for e in events) == list(range(50))
    assert int(verify(url, deep=True).exit_code) == 0
