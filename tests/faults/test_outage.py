"""Sixteen writers record while their S3 server is killed, restarted, unreachable and badly connected.

The run, its writers and its checks are `tools/outage.py`; a bigger one is a matter of its options.
"""

from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import outage
import pytest
from outage import Notes, Options, Watch

pytest.importorskip("s3fs")


@pytest.mark.slow
def test_an_object_store_that_dies_and_answers_badly_costs_sixteen_writers_nothing(tmp_path: Path) -> None:
    """Exactly the acknowledged events, verify 0, nobody blocked, nobody told, the shipper recovers by itself."""
    done = outage.play(tmp_path, Options(writers=16, seconds=24.0, rate=30.0, plan=("kill", "chaos", "hole")))
    assert done["acknowledged"] > 16
    fates = Counter(done["fates"])
    assert fates.total() > fates["pass"] > 0, "the misfortunes met nobody"


class Checked:
    """A finished run of two writers of two events each, as `outage.check` finds it, to be spoilt by a test."""

    def __init__(self, where: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.where = where
        self.found: Counter[tuple[str, int]] = Counter()
        self.verified = SimpleNamespace(returncode=0, stdout='{"findings": []}', stderr="")
        self.said, self.codes = ["", ""], [0, 0]
        self.notes = [Notes(where / f"{rank}.notes", new=True) for rank in range(2)]
        for rank, note in enumerate(self.notes):
            for seq in range(2):
                note.acknowledge(f"{rank}" * 32, seq)
                self.found[f"{rank}" * 32, seq] += 1
            note.put("done", 1)
        self.watch = Watch(where)
        self.watch.files, self.watch.memory = [12], [1 << 20]
        monkeypatch.setattr(outage, "numbers", lambda url, environ: self.found)
        monkeypatch.setattr(outage.subprocess, "run", lambda *_, **__: self.verified)

    def check(self) -> dict[str, object]:
        return outage.check(self.where, "s3://b/l", {}, self.said, self.codes, self.watch)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Checked:
    return Checked(tmp_path, monkeypatch)


def test_the_check_passes_what_kept_every_promise(run: Checked) -> None:
    assert run.check()["acknowledged"] == 4


@pytest.mark.parametrize(
    ("name", "spoil"),
    [
        ("lost", lambda run: run.found.pop(("0" * 32, 1))),
        ("doubled", lambda run: run.found.update([("0" * 32, 1)])),
        ("never acknowledged", lambda run: run.found.update([("0" * 32, 9)])),
        ("one number twice", lambda run: run.notes[0].acknowledge("0" * 32, 1)),
        ("verify exits with 3", lambda run: setattr(run.verified, "returncode", 3)),
        ("writer 1 ended with", lambda run: run.codes.__setitem__(1, 1)),
        ("writer 0 ended with", lambda run: run.said.__setitem__(0, "RuntimeError: Event loop is closed")),
        ("took", lambda run: run.notes[0].put("slowest_ns", int((outage.LIMIT_S + 1) * 1e9))),
        ("grew", lambda run: run.notes[0].put("memory_after", outage.FLAT_BYTES + 1)),
        ("open files", lambda run: run.notes[0].put("files_after", 20)),
        ("the shipper had", lambda run: run.watch.files.append(5000)),
        ("no shipper was seen", lambda run: run.watch.files.clear()),
    ],
)
def test_the_check_notices_every_broken_promise(run: Checked, name: str, spoil) -> None:
    spoil(run)
    with pytest.raises(AssertionError, match=name):
        run.check()
