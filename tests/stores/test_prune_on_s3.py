"""Pruning a bucket: with a job's credentials it is refused and nothing is half done; with the owner's it goes on."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from store_servers import SeaweedFS

from rlk_ledger.build import build, event
from rlk_ledger.verify import verify

RUN = "r1"
PREFIX = "team/rl"
A = "0a" * 16
PROGRAM = str(Path(sys.executable).with_name("rlk-ledger"))


def fill(url: str) -> None:
    records = [event(RUN, A, 0, "run.opened", roles={"training": 1})]
    records.append(event(RUN, A, 1, "writer.opened", role="training", rank=0, world_size=1))
    values = {"source": "training", "contract_id": "c", "values": [-1.0]}
    records += [event(RUN, A, 2 + i, "logprobs", sample_id=f"s{i}", step=i, **values) for i in range(4)]
    records.append(event(RUN, A, 6, "writer.closed", reason="done"))
    build(url, RUN, records, roles={"training": 1}, per_segment=2)


def call(environ: dict[str, str], *argv: str) -> tuple[int, str, str]:
    """(exit code, stdout, stderr) of a command run with these credentials; a client is one process's."""
    done = subprocess.run([PROGRAM, *argv], env={**os.environ, **environ}, text=True, capture_output=True)
    return done.returncode, done.stdout, done.stderr


def test_a_job_cannot_prune_and_the_owner_goes_on_where_it_was_refused(
    seaweedfs: SeaweedFS, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = seaweedfs.url(f"{PREFIX}/{name}")
    for variable, value in seaweedfs.environ.items():
        monkeypatch.setenv(variable, value)
    fill(url)
    job = seaweedfs.environ_of("job-key", "job-secret")
    code, _, error = call(job, "prune", RUN, "--all", "--ledger", url)
    assert code == 2
    assert "0 of 4 segments were deleted, then: cannot delete" in error
    assert "Traceback" not in error
    half = verify(url)
    assert {f.kind for f in half.findings if f.severity != "info"} == set()
    assert "prune.unfinished" in {f.kind for f in half.findings}
    code, out, error = call(seaweedfs.environ, "prune", RUN, "--all", "--ledger", url, "--json")
    assert (code, error) == (0, "")
    assert json.loads(out)["deleted"] == json.loads(out)["unfinished"] == 4
    after = verify(url)
    assert after.exit_code == 0
    assert {"segment.pruned"} <= {f.kind for f in after.findings}
    code, out, error = call(job, "show", RUN, "--ledger", url)
    assert (code, error) == (0, "")
    assert "4 of 5 segments pruned" in out


def test_a_hold_placed_with_a_jobs_credentials_is_seen_by_the_owners_prune(
    seaweedfs: SeaweedFS, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = seaweedfs.url(f"{PREFIX}/{name}")
    for variable, value in seaweedfs.environ.items():
        monkeypatch.setenv(variable, value)
    fill(url)
    environ = seaweedfs.environ_of("job-key", "job-secret")
    assert call(environ, "hold", RUN, "--reason", "litigation", "--by", "counsel", "--ledger", url)[0] == 0
    code, _, error = call(seaweedfs.environ, "prune", RUN, "--all", "--ledger", url)
    assert code == 2
    assert "by counsel: litigation); nothing was deleted" in error
