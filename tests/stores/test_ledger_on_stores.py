"""The whole way on every store: two processes record, the shipper ships, and every command reads it back."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from store_servers import Azurite, Server

from rlk_ledger.store import open_store

JOB = """
import os
import sys
import rlk_ledger

url, role, temperature, *values = sys.argv[1:]
rlk_ledger.init(url, run_id="r1", role=role, roles={"rollout": 1, "training": 1})
body = {"mode": "processed", "temperature": float(temperature)}
contract = rlk_ledger.record("contract.declared", kind="logprob", version="1", body=body).contract_id
span = {"version": "v3", "start": 0, "end": 3}
for step in range(3):
    with rlk_ledger.scope(step=step):
        if role == "rollout":
            rlk_ledger.record("rollout.sample", sample_id=f"s{step}", response_token_ids=[11, 42, 7],
                              loss_mask=[1, 1, 1], weight_spans=[span])
        rlk_ledger.record("logprobs", sample_id=f"s{step}", source=role, values=[float(v) for v in values],
                          contract_id=contract, weight_version="v3")
    print(rlk_ledger.flush("committed", timeout=float(os.environ.get("FLUSH_S", "90")))["committed"])
"""
ROLLOUT, TRAINING = ("0.7", "-0.51", "-1.20", "-0.03"), ("1.0", "-0.80", "-1.71", "-0.15")


class Job:
    """Processes that record into one ledger through one spool."""

    def __init__(self, spool: Path, url: str, server: Server, **environ: str) -> None:
        self.url = url
        self.spool = spool
        self.script = spool.parent / "job.py"
        self.script.write_text(JOB)
        drop = ("PYTEST_CURRENT_TEST", "RLK_LEDGER")
        self.environ = {name: value for name, value in os.environ.items() if name not in drop}
        self.environ |= {**server.environ, "RLK_SPOOL": str(spool), **environ}

    def record(self, role: str, *numbers: str) -> subprocess.Popen[str]:
        command = [sys.executable, str(self.script), self.url, role, *numbers]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        return subprocess.Popen(command, env=self.environ, **pipes)

    def command(self, *args: str) -> subprocess.CompletedProcess[str]:
        program = str(Path(sys.executable).with_name("rlk-ledger"))
        return subprocess.run([program, *args, "--ledger", self.url], env=self.environ, text=True, capture_output=True)

    def both(self) -> list[tuple[int, str, str]]:
        """(exit code, output, errors) of a rollout and a training process that ran side by side."""
        jobs = [self.record("rollout", *ROLLOUT), self.record("training", *TRAINING)]
        return [(job.wait(), *job.communicate()) for job in jobs]


@pytest.fixture
def job(spool: Path, server: Server, name: str) -> Job:
    return Job(spool, server.url(name), server)


@pytest.mark.slow
def test_two_processes_record_into_a_bucket_and_every_command_reads_it(job: Job, server: Server) -> None:
    for code, out, err in job.both():
        assert code == 0, err
        assert len(out.split()) == 3, "every flush reached the bucket"
        assert "Traceback" not in err
    done = job.command("verify", "--deep", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    # both processes opened the run, declared a contract, and closed; three samples, six lists of log-probabilities
    assert json.loads(done.stdout)["events"] == 2 * 4 + 3 + 6
    query = "select count(distinct sample_id) as samples, max(abs_dlogp) as worst from tokens where run_id = 'r1'"
    (row,) = json.loads(job.command("query", query, "--json").stdout)
    assert row == {"samples": 3, "worst": pytest.approx(0.51, rel=1e-4)}
    audit = job.command("audit", "r1", "--json")
    assert audit.returncode == 1, audit.stderr
    assert json.loads(audit.stdout)["verdict"] == "not_comparable"
    assert "rollout x1, training x1" in job.command("show", "r1").stdout
    _no_secret_anywhere(job, server)


def _no_secret_anywhere(job: Job, server: Server) -> None:
    """Neither an object of the ledger nor a file of the spool holds a credential of the store."""
    secrets = [value for name, value in server.environ.items() if "KEY" in name]
    if isinstance(server, Azurite):
        secrets = [server.environ["AZURE_STORAGE_CONNECTION_STRING"].partition("AccountKey=")[2].partition(";")[0]]
    store = open_store(job.url)
    objects = {entry.path: store.read(entry.path) for entry in store.list("")}
    assert {"ledger.json", "canary/twice", "runs/r1/run.json"} <= set(objects)
    files = {str(path): path.read_bytes() for path in job.spool.rglob("*") if path.is_file()}
    for place, data in {**objects, **files}.items():
        for secret in secrets:
            assert secret.encode() not in data, place


@pytest.mark.parametrize("mode", ["off", "process"])
def test_what_waits_in_the_spool_holds_no_credential(spool: Path, seaweedfs: Server, name: str, mode: str) -> None:
    """Shipping is off, or refused by the store: the spool, the status and the log hold events, and no secret."""
    wrong = {**seaweedfs.environ, "AWS_ACCESS_KEY_ID": "no-such-key-id", "AWS_SECRET_ACCESS_KEY": "no-such-secret"}
    job = Job(spool, seaweedfs.url(name), seaweedfs, RLK_SHIPPER=mode, RLK_EXIT_S="1", FLUSH_S="6", **wrong)
    done = job.record("rollout", *ROLLOUT)
    _, err = done.communicate()
    if mode == "process":
        assert "cannot" in err, "the flush says why"
    waiting = [path for path in job.spool.rglob("*") if path.is_file()]
    assert any(b"rollout.sample" in path.read_bytes() for path in waiting), "the events are in the spool"
    for path in waiting:
        data = path.read_bytes()
        assert b"no-such-secret" not in data, path


@pytest.mark.slow
def test_a_store_that_overwrites_is_told_to_the_job_in_verify_and_refused_when_strict(
    spool: Path, careless_gcs: Server, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable, value in careless_gcs.environ.items():
        monkeypatch.setenv(variable, value)
    job = Job(spool, careless_gcs.url(name), careless_gcs)
    for code, _, err in job.both():
        assert code == 0, err
        assert "overwrites objects it was told to create only" in err, "the job's log says it"
    told = job.command("verify", "--json")
    assert told.returncode == 0, told.stdout
    kinds = [(f["kind"], f["object"]) for f in json.loads(told.stdout)["findings"]]
    assert ("store.overwrites", "ledger.json") in kinds
    ledger = json.loads(open_store(job.url).read("ledger.json"))
    assert ledger["put_if_absent"] == "ignored"

    strict = Job(
        spool,
        careless_gcs.url(f"{name}-strict"),
        careless_gcs,
        RLK_CONSISTENCY="strict",
        RLK_EXIT_S="1",
        FLUSH_S="6",
    )
    refused = strict.record("rollout", *ROLLOUT)
    _, err = refused.communicate()
    assert refused.returncode != 0
    assert "overwrites objects it was told to create only" in err
    assert "Use a store with conditional writes" in err
    assert [entry.path for entry in open_store(strict.url).list("runs")] == [], "nothing was shipped there"
