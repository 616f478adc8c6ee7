"""A process that used a bucket forks: parent and child ship inline, and both end as they always would."""

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

from store_servers import Server

from rlk_ledger import ledger as ledgers

JOB = """
import os
import sys
import rlk_ledger

rlk_ledger.init(sys.argv[1], run_id="r1", role="training", roles={"training": 1}, shipper="inline")

def record(what):
    for i in range(3):
        rlk_ledger.record("weights.published", weight_version=f"{what}{i}", digest="sha256:00", tensor_count=i)
    rlk_ledger.flush("committed", timeout=60)

record("before")
child = os.fork()
if child == 0:
    record("child")
    sys.exit(7)  # with everything that runs at exit
record("after")
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_parent_and_forked_child_ship_inline_and_end(server: Server, spool: Path, name: str) -> None:
    script = spool.parent / "job.py"
    script.write_text(JOB)
    environ = {variable: value for variable, value in os.environ.items() if variable != "PYTEST_CURRENT_TEST"}
    environ |= {"RLK_SPOOL": str(spool)}
    command = [sys.executable, str(script), server.url(name)]
    done = subprocess.run(command, env=environ, text=True, capture_output=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "7\n"), done.stderr
    events = ledgers.open_ledger(server.url(name)).read_events("r1", {"weights.published"})
    found = Counter(fields["weight_version"] for _, _, fields, _ in events)
    assert found == Counter(f"{what}{i}" for what in ("before", "child", "after") for i in range(3))
