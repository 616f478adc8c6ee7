"""Fork, spawn, os._exit, exit and threads: every process is a writer of its own, and no exit hangs."""

import contextlib
import importlib
import multiprocessing
import os
import subprocess
import sys
import textwrap
import threading

import msgspec
import pytest

from rlk_ledger_sdk import api, forks, process, record, recorder
from rlk_ledger_sdk.durability import LEVELS
from rlk_ledger_sdk.testing import read_spool, unaccounted


def knob(path="a"):
    return record("knob.applied", path=path, requested=1, status="applied")


def images(spool):
    found = {d.name: read_spool(d) for d in spool.glob("*/") if any(d.glob("*.spool"))}
    for image in found.values():
        assert unaccounted(image.events) == []
    return found


def in_fork(work):
    """Runs `work` in a forked child and returns its exit status."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    return os.waitpid(child, 0)[1]


def run(code, **env):
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("RLK_", "PYTEST_"))}
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], env={**clean, **env}, capture_output=True, text=True, timeout=120
    )


@pytest.mark.parametrize("mark", ["page", "pid"])
def test_a_forked_child_is_a_new_writer_that_names_its_parent(opened, monkeypatch, mark):
    if mark == "pid":
        monkeypatch.setattr(recorder, "new_mark", forks._PidMark)
    parent = opened(role="rollout")
    knob("before")
    assert in_fork(lambda: knob("child")) == 0
    knob("after")
    found = images(parent.config.spool)
    assert [e.fields.get("path") for e in found[parent.writer_id].events[2:]] == ["before", "after"]
    (child,) = (image for name, image in found.items() if name != parent.writer_id)
    opened_event, stored = child.events
    assert opened_event.type == "writer.opened"
    assert (opened_event.fields["parent_writer"], opened_event.fields["role"]) == (parent.writer_id, "rollout")
    assert opened_event.fields["pid"] == child.header.pid != os.getpid()
    assert stored.fields["path"] == "child"


def test_a_child_that_records_nothing_leaves_nothing(opened):
    parent = opened()
    assert in_fork(lambda: None) == 0
    assert in_fork(api.close) == 0

    def only_flushes():
        assert api.flush("committed", timeout=0) == dict.fromkeys(LEVELS, -1)

    assert in_fork(only_flushes) == 0
    knob()
    assert list(images(parent.config.spool)) == [parent.writer_id]


def test_a_grandchild_names_the_child(opened):
    parent = opened()

    def work():
        mine = knob("child").writer_id
        assert in_fork(lambda: knob(mine)) == 0

    assert in_fork(work) == 0
    found = images(parent.config.spool)
    assert len(found) == 3
    grandchild = next(i for i in found.values() if i.events[-1].fields.get("path") in found)
    assert grandchild.events[0].fields["parent_writer"] == grandchild.events[-1].fields["path"]


@contextlib.contextmanager
def held_by_another_thread(lock):
    held, release = threading.Event(), threading.Event()

    def hold():
        with lock:
            held.set()
            release.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    try:
        yield
    finally:
        release.set()
        thread.join()


def test_a_fork_while_another_thread_holds_the_lock_does_not_deadlock_the_child(opened):
    parent = opened()
    with held_by_another_thread(parent._lock):
        assert in_fork(lambda: knob("child")) == 0
    assert len(images(parent.config.spool)) == 2


def test_a_fork_during_anothers_init_does_not_deadlock_the_childs_first_record():
    with held_by_another_thread(api._lock):
        assert in_fork(lambda: knob("child")) == 0


def test_what_the_child_does_never_touches_the_parents_bytes(opened):
    parent = opened()
    before = [knob(str(n)).seq for n in range(50)]

    def work():
        for n in range(2000):
            knob("child" + str(n))

    assert in_fork(work) == 0
    after = [knob(str(n)).seq for n in range(50)]
    assert before + after == list(range(2, 102))
    assert len(images(parent.config.spool)[parent.writer_id].events) == 102


@pytest.mark.parametrize("method", ["spawn", "forkserver", "fork"])
def test_multiprocessing_children_record_by_themselves(opened, method, tmp_path, monkeypatch):
    source = "from rlk_ledger_sdk import record\n\n\ndef main(path):\n"
    source += "    record('knob.applied', path=path, requested=1, status='applied')\n"
    (tmp_path / "worker_of_a_job.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    child_main = importlib.import_module("worker_of_a_job").main
    parent = opened(run_id="mp")
    context = multiprocessing.get_context(method)
    children = [context.Process(target=child_main, args=(f"child-{n}",)) for n in range(2)]
    for child in children:
        child.start()
    for child in children:
        child.join()
        assert child.exitcode == 0
    found = images(parent.config.spool)
    paths = {e.fields["path"] for i in found.values() for e in i.events if e.type == "knob.applied"}
    assert paths == {"child-0", "child-1"}
    for name, image in found.items():
        assert image.header.run_id == "mp"
        if name != parent.writer_id:
            writer = next(e for e in image.events if e.type == "writer.opened")
            assert writer.fields["parent_writer"] == parent.writer_id
            assert image.events[-1].type == "writer.closed"  # a worker that ended by itself was not killed


def test_a_process_initialises_itself_from_the_environment(tmp_path):
    done = run(
        "import rlk_ledger_sdk as r; print(r.record('knob.applied', path='a', requested=1, status='applied').seq)",
        RLK_LEDGER=str(tmp_path / "l"),
        RLK_RUN_ID="env",
        RLK_ROLE="reward",
        RLK_SPOOL=str(tmp_path / "s"),
        RLK_SHIPPER="off",
    )
    assert (done.stdout.strip(), done.stderr) == ("2", "")
    (image,) = images(tmp_path / "s").values()
    assert image.events[1].fields["role"] == "reward"
    assert "parent_writer" not in image.events[1].fields


def test_a_malformed_environment_never_reaches_a_job_that_only_records(tmp_path):
    done = run(
        "import rlk_ledger_sdk as r\nfor _ in range(3): print(r.record('knob.applied').seq)",
        RLK_LEDGER="s4://nowhere",
        RLK_RUN_ID="env",
    )
    assert done.returncode == 0
    assert done.stdout.split() == ["None"] * 3
    assert done.stderr.count("unknown scheme") == 1


def test_a_ledger_without_a_run_says_once_that_nothing_is_recorded(tmp_path):
    done = run("import rlk_ledger_sdk as r\nfor _ in range(3): r.record('x')", RLK_LEDGER=str(tmp_path))
    assert done.stderr.count("nothing is recorded") == 1


def test_os_exit_keeps_everything_recorded(tmp_path):
    done = run(
        f"""
        import os, rlk_ledger_sdk as r
        r.init({str(tmp_path / "l")!r}, spool={str(tmp_path / "s")!r}, shipper="off")
        for n in range(100):
            r.record("knob.applied", path=str(n), requested=1, status="applied")
        os._exit(7)
        """
    )
    assert done.returncode == 7
    (image,) = images(tmp_path / "s").values()
    assert len(image.events) == 102


@pytest.mark.parametrize("end", ["", "raise SystemExit(3)", "raise RuntimeError('boom')"])
def test_a_normal_exit_closes_the_writer(tmp_path, end):
    run(
        f"""
        import rlk_ledger_sdk as r
        r.init({str(tmp_path / "l")!r}, spool={str(tmp_path / "s")!r}, shipper="off")
        {end}
        """
    )
    (image,) = images(tmp_path / "s").values()
    assert (image.events[-1].type, image.events[-1].fields) == ("writer.closed", {"reason": "exit"})


def test_exit_gives_up_on_a_shipper_that_never_answers(tmp_path):
    """The lock is held, so a shipper is expected; it never ships; the exit waits RLK_EXIT_S and says what is left."""
    done = run(
        f"""
        import fcntl, os, pathlib, time, rlk_ledger_sdk as r
        spool = pathlib.Path({str(tmp_path / "s")!r}); spool.mkdir(mode=0o700)
        lock = open(spool / "shipper.lock", "w"); fcntl.flock(lock, fcntl.LOCK_EX)
        r.init({str(tmp_path / "l")!r}, spool=spool)
        """,
        RLK_EXIT_S="0.2",
    )
    assert done.returncode == 0
    assert "4 events" not in done.stderr
    assert "3 events of writer" in done.stderr
    assert "safe in the spool" in done.stderr
    (image,) = images(tmp_path / "s").values()
    assert image.events[-1].type == "writer.closed"


def test_liveness_is_told_from_pid_start_time_namespace_and_boot():
    class Header(msgspec.Struct):
        pid: int
        process_start: str
        host: str
        boot_id: str

    def header(**changes):
        return Header(**{**msgspec.structs.asdict(process.identity()), **changes})

    start, namespace = process.identity().process_start.split(":")
    assert process.is_alive(header()) is True
    assert process.is_alive(header(process_start=f"{int(start) + 1}:{namespace}")) is False
    assert process.is_alive(header(boot_id="another")) is False
    assert process.is_alive(header(host="elsewhere")) is None
    assert process.is_alive(header(process_start=f"{start}:1")) is None
    assert process.is_alive(header(boot_id="")) is None
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)  # a zombie is dead
    assert process.is_alive(header(pid=child)) is False
    os.waitpid(child, 0)
    assert process.is_alive(header(pid=child)) is False
