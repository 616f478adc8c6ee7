"""`doctor` on real servers: a store that serves is fit, one that is careless is not, and a lacking right is named."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from store_servers import SECRET, Server

PREFIX = "team/rl"


def doctor(server: Server, url: str, tmp_path: Path, **variables: str) -> tuple[int, dict[str, dict[str, Any]]]:
    """(exit code, rows of the store by name), asked in a process of its own as an operator asks."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("RLK_", "PYTEST_"))}
    words = [
        sys.executable,
        "-m",
        "rlk_ledger",
        "doctor",
        "--ledger",
        url,
        "--spool",
        str(tmp_path / "spool"),
        "--json",
    ]
    environment |= server.environ | variables | {"RLK_SCORER_PYTHON": "/bin/false"}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=200)
    assert SECRET not in done.stdout + done.stderr
    rows = [row for row in json.loads(done.stdout)["checks"] if row["section"] == "store"]
    return done.returncode, {row["name"]: row for row in rows}


def test_every_store_that_serves_is_fit(server: Server, name: str, tmp_path: Path) -> None:
    code, rows = doctor(server, server.url(name), tmp_path)
    assert {row["state"] for row in rows.values()} <= {"ok", "note"}, rows
    assert {"bucket get", "bucket put", "put-if-absent", "bucket list", "bucket latency", "clock"} <= rows.keys()
    assert code == 0


def test_a_store_that_ignores_put_if_absent_is_not(careless_gcs: Server, name: str, tmp_path: Path) -> None:
    code, rows = doctor(careless_gcs, careless_gcs.url(name), tmp_path)
    assert (code, rows["put-if-absent"]["state"], rows["bucket put"]["state"]) == (1, "fail", "ok")


@pytest.mark.parametrize(
    ("action", "failing"),
    [("PutObject", "bucket put"), ("GetObject", "bucket get"), ("ListBucket", "bucket list")],
)
def test_a_user_who_lacks_one_right_is_told_which(
    seaweedfs: Any, name: str, tmp_path: Path, action: str, failing: str
) -> None:
    user = f"no-{action}"
    code, rows = doctor(
        seaweedfs, seaweedfs.url(f"{PREFIX}/{name}"), tmp_path, **seaweedfs.environ_of(f"{user}-key", f"{user}-secret")
    )
    assert (code, rows[failing]["state"]) == (1, "fail"), rows
    assert rows["ledger url"]["state"] == "ok"


def test_the_least_rights_a_job_needs_are_enough(seaweedfs: Any, name: str, tmp_path: Path) -> None:
    code, rows = doctor(
        seaweedfs, seaweedfs.url(f"{PREFIX}/{name}"), tmp_path, **seaweedfs.environ_of("job-key", "job-secret")
    )
    assert code == 0, rows
    assert rows["versioning"]["state"] == "note"


def test_credentials_that_are_refused_and_a_server_that_is_gone_fail(seaweedfs: Any, name: str, tmp_path: Path) -> None:
    code, rows = doctor(seaweedfs, seaweedfs.url(name), tmp_path, **seaweedfs.environ_of("nobody", "nothing"))
    assert (code, rows["bucket get"]["state"]) == (1, "fail")
    assert "which credentials this process finds" in rows["bucket get"]["advice"], "not that a right is lacking"
    code, rows = doctor(seaweedfs, seaweedfs.url(name), tmp_path, AWS_ENDPOINT_URL="http://127.0.0.1:9")
    assert (code, rows["bucket get"]["state"], rows["bucket get"]["advice"]) == (1, "fail", None)
    assert "check the network and the endpoint (AWS_ENDPOINT_URL)" in rows["bucket get"]["text"]
    gone = seaweedfs.url(name).replace("s3://", "s3://no-such-")
    code, rows = doctor(seaweedfs, gone, tmp_path)
    assert (code, "a job makes no bucket" in rows["bucket get"]["advice"]) == (1, True)
