"""No writer is blocked longer than it was told: not by a full budget, nor by a shipper that holds its lock and hangs.

The limits are milliseconds; what is checked is a bound on a hang, some fifty times as much.
"""

import fcntl
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlk_ledger_schemas.errors import FlushTimeout
from rlk_ledger_sdk import api, spool
from rlk_ledger_sdk.recorder import Recorder

BLOCK_MS, PATIENCE_S, HANG_S = 20, 0.2, 10.0
THREADS = 8


@pytest.fixture
def recorder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorder]:
    """A recorder whose budget is used up and whose shipper, as far as it can see, runs and does nothing."""
    for name, value in (("FIRST_FILE", 8192), ("LARGEST_FILE", 8192), ("RESERVE", 2048)):
        monkeypatch.setattr(spool, name, value)
    monkeypatch.setenv("RLK_EXIT_S", str(PATIENCE_S))
    (tmp_path / "spool").mkdir(mode=0o700)
    hung = os.open(tmp_path / "spool" / "shipper.lock", os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(hung, fcntl.LOCK_EX)
    opened = api.init(
        str(tmp_path / "ledger"),
        run_id="r",
        spool=tmp_path / "spool",
        shipper="process",
        block_ms=BLOCK_MS,
        on_error="raise",
    )
    assert isinstance(opened, Recorder)
    opened._spool._budget._limit = 0
    yield opened
    api.close(timeout=0)
    os.close(hung)


def bulk() -> int | None:
    return api.record("logprobs", sample_id="s", source="rollout", contract_id="c", values=[-1.0] * 300).seq


def test_threads_without_room_wait_together_and_not_one_after_the_other(recorder: Recorder) -> None:
    while bulk() is not None:
        pass
    longest = [0.0] * THREADS
    lost = [0] * THREADS

    def work(lane: int) -> None:
        for _ in range(200):
            begun = time.monotonic()
            lost[lane] += bulk() is None
            longest[lane] = max(longest[lane], time.monotonic() - begun)

    threads = [threading.Thread(target=work, args=(lane,)) for lane in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert lost == [200] * THREADS
    assert max(longest) < 50 * BLOCK_MS / 1000 + HANG_S


@pytest.mark.parametrize("level", ["synced", "committed", "checkpointed"])
def test_a_shipper_that_hangs_costs_flush_its_timeout(recorder: Recorder, level: str) -> None:
    begun = time.monotonic()
    with pytest.raises(FlushTimeout, match=r"after 0\.2 s"):
        api.flush(level, timeout=PATIENCE_S)
    assert time.monotonic() - begun < 50 * PATIENCE_S


def test_a_shipper_that_hangs_costs_the_exit_its_limit(recorder: Recorder) -> None:
    begun = time.monotonic()
    api.close()
    assert time.monotonic() - begun < 50 * PATIENCE_S
