"""A spool whose disk is full, is made read-only or is taken away: a counted gap, never a signal, an error or a wait.

Each case is a process of its own in a mount namespace of its own, on a small file system of the kind in question:
tmpfs and ext4 (spool files are mapped) and overlay (they are written with pwrite).
"""

import json
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

MIB = 1 << 20
MOUNTS = {
    "tmpfs": "mount -t tmpfs -o size=12m none $D",
    "ext4": "truncate -s 24M $D.img && mkfs.ext4 -q -O ^has_journal $D.img && mount -o loop $D.img $D && mkdir $D/in",
    "overlay": "mount -t tmpfs -o size=12m none $D && mkdir $D/low $D/up $D/work $D/in && "
    "mount -t overlay none -o lowerdir=$D/low,upperdir=$D/up,workdir=$D/work $D/in",
}
METHODS = {"tmpfs": True, "ext4": True, "overlay": False}

PRELUDE = """
import json, os, shutil, subprocess, sys, time
from pathlib import Path
import rlk_ledger_sdk as rlk
from rlk_ledger_sdk import api
from rlk_ledger_sdk.testing import read_spool, unaccounted

where = Path(sys.argv[1]) / "in"
where.mkdir(exist_ok=True)
recorder = rlk.init("/nowhere/ledger", run_id="r", spool=where / "spool", shipper="off", on_error="warn", block_ms=0)
acknowledged, dropped = [], 0


def knob(size=2000):
    global dropped
    seq = rlk.record("knob.applied", path="p", requested=1, status="applied", evidence="e" * size).seq
    if seq is None:
        dropped += 1
    else:
        acknowledged.append(seq)
    return seq is not None


def fill(leave=0):
    with open(where / "ballast", "ab", buffering=0) as ballast:
        try:
            while True:
                ballast.write(bytes(1 << 16))
        except OSError:
            pass
        size = ballast.tell()
        ballast.truncate(max(0, size - leave))


def report(**more):
    image = read_spool(recorder.directory)
    gaps = [e.fields for e in image.events if e.type == "gap"]
    print(json.dumps({
        "acknowledged": len(acknowledged), "dropped": dropped,
        "lost": sorted(set(acknowledged) - {e.seq for e in image.events}), "unaccounted": unaccounted(image.events),
        "stated": sum(g["last"] - g["first"] + 1 for g in gaps), "reasons": sorted({g["reason"] for g in gaps}),
        **more,
    }))
"""


def mounted(kind: str, tmp_path: Path, code: str) -> Any:
    """What `code` prints as JSON on a file system of this kind; skips where none can be mounted."""
    if shutil.which("unshare") is None or (kind == "ext4" and (shutil.which("mkfs.ext4") is None or os.getuid() != 0)):
        pytest.skip(f"a private {kind} needs unshare, and ext4 needs mkfs.ext4 and root")
    where = tmp_path / "disk"
    where.mkdir()
    unshare = ["unshare", "-m"] if os.getuid() == 0 else ["unshare", "-r", "-m"]
    mount = MOUNTS[kind].replace("$D", str(where))
    if subprocess.run([*unshare, "sh", "-c", mount], capture_output=True, check=False).returncode:
        pytest.skip(f"no {kind} can be mounted here")
    (tmp_path / "disk.img").unlink(missing_ok=True)
    script = PRELUDE + textwrap.dedent(code)
    command = [*unshare, "sh", "-c", f'{mount} && exec "$@"', "sh", sys.executable, "-c", script, str(where)]
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("RLK_", "PYTEST_"))}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"the job ended with {done.returncode}: {done.stderr[-3000:]}"
    return {**json.loads(done.stdout), "said": done.stderr.splitlines()}


@pytest.mark.parametrize("kind", MOUNTS)
def test_a_full_disk_costs_a_counted_gap_and_recording_goes_on_when_there_is_room(kind: str, tmp_path: Path) -> None:
    found = mounted(
        kind,
        tmp_path,
        """
        for _ in range(50):
            assert knob()
        fill(leave=200_000)
        while knob():
            pass
        for _ in range(200):
            knob()
        full = dropped
        (where / "ballast").unlink()
        deadline = time.monotonic() + 60
        while not knob() and time.monotonic() < deadline:
            time.sleep(0.01)
        after = dropped
        for _ in range(50):
            knob()
        rlk.close(timeout=0)
        report(full=full, still=dropped - after, closed=read_spool(recorder.directory).events[-1].type)
        """,
    )
    assert found["lost"] == []
    assert found["unaccounted"] == []
    assert found["full"] > 200
    assert found["still"] == 0, "it goes on when space returns"
    assert found["stated"] == found["dropped"], "every event that found no room is counted"
    assert any("No space left" in reason for reason in found["reasons"])
    assert found["closed"] == "writer.closed"
    assert len(found["said"]) == 1, "one warning, then silence"


@pytest.mark.parametrize("kind", MOUNTS)
def test_a_disk_that_fills_up_under_an_open_file_sends_no_signal(kind: str, tmp_path: Path) -> None:
    """Everything the open file was promised is used, on a disk without a single free block."""
    found = mounted(
        kind,
        tmp_path,
        """
        assert knob()
        mapped = recorder._spool._map is not None
        fill()
        while knob(20_000):
            pass
        (where / "ballast").unlink()
        rlk.close(timeout=0)
        report(used=mapped)
        """,
    )
    assert found["used"] == METHODS[kind]
    assert found["acknowledged"] > (40 if METHODS[kind] else 0), "a mapped file has its blocks already"
    assert (found["lost"], found["unaccounted"]) == ([], [])
    assert found["stated"] == found["dropped"] == 1


def test_a_disk_that_is_full_at_the_start_never_stops_the_job(tmp_path: Path) -> None:
    found = mounted(
        "tmpfs",
        tmp_path,
        """
        rlk.close(timeout=0)
        shutil.rmtree(where / "spool")
        fill()
        recorder = rlk.init("/nowhere/l", run_id="r", spool=where / "spool", shipper="off", on_error="warn", block_ms=0)
        for _ in range(20):
            assert not knob()
        (where / "ballast").unlink()
        time.sleep(0.1)
        while not knob():
            time.sleep(0.01)
        rlk.close(timeout=0)
        report()
        """,
    )
    assert (found["lost"], found["unaccounted"]) == ([], [])
    assert found["stated"] == found["dropped"] >= 20


def test_a_spool_made_read_only_costs_a_counted_gap(tmp_path: Path) -> None:
    """The open file goes on where it is mapped; a roll finds no place and says so, until the mount is writable."""
    found = mounted(
        "tmpfs",
        tmp_path,
        """
        assert knob()
        bound = subprocess.run(["mount", "--bind", str(where), str(where)], capture_output=True).returncode
        bound |= subprocess.run(["mount", "-o", "remount,bind,ro", str(where)], capture_output=True).returncode
        assert bound == 0
        for _ in range(2000):
            knob()
        refused = dropped
        subprocess.run(["mount", "-o", "remount,bind,rw", str(where)], check=True)
        time.sleep(0.1)
        assert knob()
        rlk.close(timeout=0)
        report(refused=refused)
        """,
    )
    assert found["refused"] > 0
    assert (found["lost"], found["unaccounted"]) == ([], [])
    assert found["stated"] == found["dropped"]
