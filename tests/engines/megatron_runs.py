"""Starts the ranks of `megatron_job.py` as processes, and reads what they did and what they recorded."""

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any

from rlk_ledger.history import History, load_history
from rlk_ledger.ledger import Ledger, open_ledger
from rlk_ledger.service import ship_once

MODEL = str(resources.files("rlk_ledger_replay") / "model")
TEMPERATURE = 0.7
JOB = Path(__file__).with_name("megatron_job.py")
LIMIT_S = 120


def samples(count: int = 5) -> list[dict[str, Any]]:
    """Samples of different lengths; some of their response tokens are not trained on."""
    rng = random.Random(3)
    out = []
    for i in range(count):
        response = [rng.randrange(256) for _ in range(5 + 2 * i)]
        prompt = [256, *(rng.randrange(256) for _ in range(2 + i))]
        out.append(
            {"sample_id": f"s{i}", "prompt": prompt, "response": response, "mask": [j != 2 for j in range(5 + 2 * i)]}
        )
    return out


class Run:
    """One finished job: each rank's result, and the ledger it recorded into."""

    def __init__(self, root: Path, world: int, **job: Any) -> None:
        self.root = root
        self.job: dict[str, Any] = {
            "store": str(root / "store"),
            "world": world,
            "tp": world,
            "model": MODEL,
            "ledger": str(root / "ledger"),
            "spool": str(root / "spool"),
            "run_id": "r",
            "samples": samples(),
            "version": "v0",
            "temperature": TEMPERATURE,
        } | job
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(self) -> "Run":
        """Starts every rank."""
        self.root.mkdir(parents=True, exist_ok=True)
        (self.root / "job.json").write_text(json.dumps(self.job))
        environment = {name: value for name, value in os.environ.items() if not name.startswith("RLK_")}
        environment |= {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
        for rank in range(self.job["world"]):
            with (self.root / f"log-{rank}").open("wb") as log:
                command = [sys.executable, str(JOB), str(self.root / "job.json"), str(rank)]
                self.processes.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))
        return self

    def wait(self) -> "Run":
        """Waits until every rank ended well; quotes the log of one that did not."""
        try:
            codes = [process.wait(LIMIT_S) for process in self.processes]
        finally:
            self.stop()
        for rank, code in enumerate(codes):
            assert code == 0, (self.root / f"log-{rank}").read_text()[-3000:]
        return self

    def wait_for(self, counts: Callable[[], list[int]], ranks: int, least: int) -> bool:
        """Whether `counts` came to hold `least` for every rank before the limit."""
        deadline = time.monotonic() + LIMIT_S
        while time.monotonic() < deadline and all(process.poll() is None for process in self.processes):
            held = counts()
            if len(held) == ranks and min(held) >= least:
                return True
            time.sleep(0.05)
        return False

    def stop(self) -> None:
        """Kills the ranks that still run."""
        for process in self.processes:
            if process.poll() is None:
                process.kill()
                process.wait()

    def result(self, rank: int) -> dict[str, Any]:
        """What a rank computed."""
        return dict(json.loads((self.root / f"result-{rank}.json").read_text()))

    def ledger(self) -> Ledger:
        """The ledger, after everything in the spool was carried into it."""
        ship_once(Path(self.job["spool"]))
        return open_ledger(self.job["ledger"])

    def history(self) -> History:
        """What audit and replay read."""
        return load_history(self.ledger(), "r")

    def events(self, kind: str, run_id: str = "r") -> list[dict[str, Any]]:
        """The envelopes of one type, arrays added, in the order of writer and number."""
        found = [(w, s, e | a) for w, s, e, a in self.ledger().read_events(run_id, {kind})]
        return [event for _, _, event in sorted(found, key=lambda one: one[:2])]
