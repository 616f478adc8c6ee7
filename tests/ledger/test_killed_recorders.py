"""A recording process is killed at any moment: what record() had returned for is in the ledger afterwards."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rlk_ledger.ledger import open_ledger
from rlk_ledger.recover import recover
from rlk_ledger.verify import verify

_JOB = """
import os, sys, threading
import numpy as np
import rlk_ledger
rlk_ledger.init(sys.argv[1], run_id="r1", role="rollout", spool=sys.argv[2], shipper="off", on_error="raise")
values = np.zeros(3000, np.float32)
def work():
    while True:
        ref = rlk_ledger.record("logprobs", sample_id="s", source="rollout", contract_id="c", values=values)
        os.write(1, b"%d\\n" % ref.seq)
for _ in range(int(sys.argv[3])):
    threading.Thread(target=work).start()
"""


@pytest.mark.parametrize(("threads", "lines"), [(1, 3), (1, 150), (1, 700), (3, 40), (3, 400)])
def test_every_acknowledged_event_of_a_killed_process_is_recovered(tmp_path: Path, threads: int, lines: int) -> None:
    url, spool = str(tmp_path / "ledger"), tmp_path / "spool"
    command = [sys.executable, "-c", _JOB, url, str(spool), str(threads)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as job:
        assert job.stdout is not None
        acknowledged = [int(job.stdout.readline()) for _ in range(lines)]
        os.kill(job.pid, signal.SIGKILL)
        acknowledged += [int(line) for line in job.stdout.read().splitlines()]
    (saved,) = recover(spool)
    assert saved.state == "dead"
    own = sorted(seq for w, seq, _, _ in open_ledger(url).read_events("r1") if w == saved.writer_id)
    assert set(acknowledged) <= set(own)
    assert own == list(range(saved.events)), "contiguous, each once"
    total = sum(1 for _ in open_ledger(url).read_events("r1"))
    assert total == saved.events + 2, "and the shipper's own two statements"
    result = verify(url, deep=True)
    assert result.verdict == ("incomplete" if saved.lost_bytes else "intact")
    assert {f.kind for f in result.findings} <= {"writer.killed", "bytes.lost"}
    assert list(spool.glob("*/*.spool")) == []
