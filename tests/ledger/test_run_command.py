"""`run -- CMD`: the job's exit code, signals and streams pass through, and what it recorded is committed or named."""

import json
import os
import pty
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from waiting import wait_for

from rlk_ledger.verify import verify

RLK = [sys.executable, "-m", "rlk_ledger"]
CALM = ["env", "--default-signal"]
"""Starts with every signal as it is by default: who runs the tests in a shell's background ignores SIGINT."""
DEAD_BUCKET = "/proc/nowhere"
COMMITTED = "rlk-ledger run: everything that was recorded is committed."

JOB = """
import os, signal, sys, time
import rlk_ledger

count, then = int(sys.argv[1]), sys.argv[2]
rlk_ledger.init(run_id="r1", role="training")
for i in range(count):
    rlk_ledger.record("weights.published", weight_version=f"v{i}", digest="sha256:00", tensor_count=1)
if then == "wait":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
    print("recorded", flush=True)
    while True:
        time.sleep(0.05)
elif then == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
elif then == "hang":
    print("recorded", flush=True)
    while True:
        time.sleep(60)
"""


@pytest.fixture
def job(tmp_path: Path) -> Path:
    path = tmp_path / "job.py"
    path.write_text(JOB)
    return path


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("RLK_", "PYTEST_"))}
    return clean | {"RLK_LEDGER": str(tmp_path / "ledger"), "RLK_SPOOL": str(tmp_path / "spool"), "RLK_EXIT_S": "0"}


@pytest.fixture
def start(environment: dict[str, str], tmp_path: Path):
    """Starts `rlk-ledger run` in a session of its own; whatever is left of it is killed at the end."""
    started: list[subprocess.Popen[str]] = []

    def run(*words: str, prefix: tuple[str, ...] = (), **options: Any) -> subprocess.Popen[str]:
        variables = environment | options.pop("env", {})
        process = subprocess.Popen(
            [*CALM, *prefix, *RLK, "run", *words],
            env=variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            **options,
        )
        started.append(process)
        return process

    yield run
    for process in started:
        process.kill()
        process.wait()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes()
        except OSError:
            continue
        if b"rlk_ledger.shipper" in words and str(tmp_path).encode() in words:
            os.kill(int(path.parent.name), signal.SIGKILL)


def last_line(err: str) -> str:
    """The statement; on a slow machine a line before it says that the ledger is waited for."""
    return err.splitlines()[-1]


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    _, err = process.communicate(timeout=120)
    return process.returncode, err


@pytest.mark.parametrize(("then", "code"), [("end", 0), ("killed", 137)])
def test_the_exit_code_is_the_jobs_and_everything_it_recorded_is_committed(
    start, job: Path, environment: dict[str, str], then: str, code: int
) -> None:
    """The job itself waits for nothing (RLK_EXIT_S=0) and starts no shipper: both are the supervisor's work."""
    got, err = ended(start("--", sys.executable, str(job), "40", then, env={"RLK_SHIPPER": "off"}))
    assert (got, last_line(err)) == (code, COMMITTED)
    found = verify(environment["RLK_LEDGER"], deep=True)
    said = 1 if then == "end" else 2  # writer.closed, or the shipper's writer.opened and writer.lost
    assert (found.exit_code, found.events) == (0, 42 + said)


def test_a_command_that_is_not_there_or_is_no_program_answers_as_a_shell_does(start, tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text("no program")
    assert ended(start("--", "no-such-command"))[0] == 127
    assert ended(start("--", str(tmp_path / "none")))[0] == 127
    code, err = ended(start("--", str(text)))
    assert (code, "cannot be run: Permission denied" in err) == (126, True)
    text.chmod(0o755)
    code, err = ended(start("--", str(text)))
    assert (code, "no #! line" in err) == (126, True)
    assert ended(start())[0] == 2


def test_a_job_without_a_ledger_is_not_told_that_something_is_committed(start) -> None:
    code, err = ended(start("--", "true", env={"RLK_LEDGER": ""}))
    assert (code, "RLK_LEDGER is not set" in err, "is committed" in err) == (0, True, False)


def test_a_mistyped_ledger_is_refused_before_the_job_runs(start, tmp_path: Path) -> None:
    code, err = ended(start("--ledger", "s3:/bucket/x", "--", "touch", str(tmp_path / "ran")))
    assert (code, "rlk-ledger: --ledger 's3:/bucket/x' lacks a slash" in err) == (2, True)
    assert not (tmp_path / "ran").exists()


def test_a_signal_reaches_the_job_once_and_its_answer_is_the_exit_code(start, job: Path, environment) -> None:
    process = start("--", sys.executable, str(job), "5", "wait")
    assert process.stdout.readline() == "recorded\n"
    process.send_signal(signal.SIGTERM)
    code, err = ended(process)
    assert (code, "everything that was recorded is committed" in err) == (7, True)
    assert verify(environment["RLK_LEDGER"]).exit_code == 0


def test_every_forwarded_signal_arrives_as_itself(start) -> None:
    code = (
        "import signal, sys\n"
        "numbers = [signal.SIGHUP, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM]\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, numbers)\n"
        "print('ready', flush=True)\n"
        "for _ in numbers: print(signal.sigwait(numbers).name, flush=True)\n"
    )
    process = start("--", sys.executable, "-c", code)
    assert process.stdout.readline() == "ready\n"
    for name in ("SIGHUP", "SIGINT", "SIGUSR1", "SIGUSR2", "SIGTERM"):
        process.send_signal(getattr(signal, name))
        assert process.stdout.readline() == f"{name}\n"
    assert ended(process)[0] == 0


def test_the_job_starts_with_the_signals_it_would_have_had(start) -> None:
    """Nothing blocked, SIGPIPE not ignored (Python ignores it for itself), a nohup kept."""
    words = ("--", "grep", "-E", "SigBlk|SigIgn", "/proc/self/status")
    process = start(*words, prefix=("env", "--ignore-signal=HUP"))
    out, _ = process.communicate(timeout=60)
    blocked, ignored = (int(line.split()[1], 16) for line in out.splitlines())
    ours = (1 << 31) - 1  # the C library keeps signals 32 and 33 to itself
    assert (blocked, ignored & ours) == (0, 1 << (signal.SIGHUP - 1))


def test_what_a_killed_group_leaves_is_named_first_and_recovered_later(start, job: Path, environment, tmp_path) -> None:
    """The scheduler's way: SIGTERM to every process at once, SIGKILL to all of them a little later."""
    process = start("--grace", "600", "--", sys.executable, str(job), "30", "wait", env={"RLK_LEDGER": DEAD_BUCKET})
    assert process.stdout.readline() == "recorded\n"
    os.killpg(process.pid, signal.SIGTERM)
    assert f"what is left in {environment['RLK_SPOOL']}" in process.stderr.readline()
    for pid in _shippers(tmp_path):
        os.kill(pid, signal.SIGKILL)
    os.killpg(process.pid, signal.SIGKILL)
    ended(process)
    wait_for(lambda: not _shippers(tmp_path))
    ledger = str(tmp_path / "other")
    words = [*RLK, "recover", environment["RLK_SPOOL"], "--ledger", ledger, "--json"]
    saved = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert saved.returncode == 0, saved.stderr
    assert [one["shipped"] for one in json.loads(saved.stdout)["writers"]] == [33]
    assert verify(ledger, deep=True).exit_code == 0


def _shippers(tmp_path: Path) -> list[int]:
    out = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes()
        except OSError:
            continue
        if b"rlk_ledger.shipper" in words and str(tmp_path).encode() in words:
            out.append(int(path.parent.name))
    return out


def test_a_second_signal_cuts_the_wait_short_and_says_where_the_events_are(start, job: Path, environment) -> None:
    words = ("--grace", "600", "--", sys.executable, str(job), "30", "killed")
    process = start(*words, env={"RLK_LEDGER": DEAD_BUCKET})
    assert "waiting up to 600 s" in process.stderr.readline()
    process.send_signal(signal.SIGTERM)
    assert "once more leaves it in the spool" in process.stderr.readline()
    process.send_signal(signal.SIGTERM)
    code, err = ended(process)
    assert code == 137
    assert "32 events of 1 writer are not committed yet (a signal ended the wait)" in err
    assert f"`rlk-ledger recover {environment['RLK_SPOOL']}` ships them" in err
    assert "nothing committed, 32 wait" in err


def test_the_wait_ends_with_the_grace_and_the_document_counts_what_is_left(start, job: Path) -> None:
    words = ("--grace", "0.5", "--json", "--", sys.executable, str(job), "30", "killed")
    code, err = ended(start(*words, env={"RLK_LEDGER": DEAD_BUCKET}))
    document = json.loads(err.splitlines()[-1])
    assert (code, document["exit_code"], document["drained"], document["waiting_events"]) == (137, 137, False, 32)
    (writer,) = document["writers"]
    assert (writer["state"], writer["events"], writer["committed"]) == ("dead", 32, -1)


DAEMON = """
import os, sys, time
import rlk_ledger

if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        for stream in (0, 1, 2):
            os.dup2(os.open(os.devnull, os.O_RDWR), stream)
        rlk_ledger.init(run_id="r1", role="training")
        open(sys.argv[1] + ".up", "w").close()
        i = 0
        while not os.path.exists(sys.argv[1]):
            rlk_ledger.record("weights.published", weight_version=f"v{i}", digest="sha256:00", tensor_count=1)
            i += 1
            time.sleep(0.01)
        open(sys.argv[1] + ".count", "w").write(str(i))
    os._exit(0)
while not os.path.exists(sys.argv[1] + ".up"):
    time.sleep(0.01)
"""


def test_a_child_that_outlives_the_job_is_waited_for(start, environment, tmp_path: Path) -> None:
    (tmp_path / "daemon.py").write_text(DAEMON)
    flag = tmp_path / "stop"
    process = start("--grace", "120", "--", sys.executable, str(tmp_path / "daemon.py"), str(flag))
    assert "waiting up to 120 s" in process.stderr.readline()  # the command has ended, its child records
    flag.touch()
    code, err = ended(process)
    assert (code, last_line(err)) == (0, COMMITTED)
    found = verify(environment["RLK_LEDGER"])
    # Its opening events, what it counted, and as it left by os._exit the two of the shipper that say so.
    assert found.events == int((tmp_path / "stop.count").read_text()) + 2 + 2


def test_a_child_that_never_ends_is_named_and_served_on(start, environment, tmp_path: Path) -> None:
    (tmp_path / "daemon.py").write_text(DAEMON)
    flag = tmp_path / "stop"
    process = start("--grace", "1", "--", sys.executable, str(tmp_path / "daemon.py"), str(flag))
    code, err = ended(process)
    assert code == 0
    assert "1 process of the job still record" in err
    flag.touch()
    wait_for((tmp_path / "stop.count").exists)
    wait_for(lambda: not list(Path(environment["RLK_SPOOL"]).glob("*/*.spool")))
    found = verify(environment["RLK_LEDGER"])
    assert found.events == int((tmp_path / "stop.count").read_text()) + 2 + 2


def test_another_jobs_writers_are_not_waited_for(start, job: Path, environment) -> None:
    """They share the default spool directory of the node: one is there before, one comes and stays."""
    other = {"RLK_LEDGER": DEAD_BUCKET, "RLK_SHIPPER": "off"}
    words = [sys.executable, str(job), "3", "hang"]
    running = [subprocess.Popen(words, env=environment | other, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    try:
        assert running[0].stdout.readline() == "recorded\n"
        running[0].kill()
        script = f"read line; exec {sys.executable} {job} 4 end"
        process = start("--grace", "600", "--", "sh", "-c", script, stdin=subprocess.PIPE)
        assert running[1].stdout.readline() == "recorded\n"
        process.stdin.write("go\n")
        process.stdin.flush()
        code, err = ended(process)
        assert (code, last_line(err)) == (0, COMMITTED)
    finally:
        for one in running:
            one.kill()
            one.wait()
            one.stdout.close()


NAMESPACE = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")
needs_namespaces = pytest.mark.skipif(
    subprocess.run([*NAMESPACE, "true"], capture_output=True, check=False).returncode != 0,
    reason="this machine lets nobody make a pid namespace",
)

ZOMBIES = """
import os, sys, time

for _ in range(20):
    if os.fork() == 0:
        if os.fork() == 0:
            time.sleep(0.05)
        os._exit(0)
    os.wait()
time.sleep(0.2)
deadline = time.monotonic() + 30
def zombies():
    states = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                states.append(open(f"/proc/{name}/stat").read().rpartition(")")[2].split()[0])
            except OSError:
                pass
    return states.count("Z")
while zombies() and time.monotonic() < deadline:
    time.sleep(0.05)
print(os.getppid(), zombies())
sys.exit(3)
"""


@needs_namespaces
def test_as_process_1_it_reaps_what_is_left_to_it(start) -> None:
    process = start("--", sys.executable, "-c", ZOMBIES, prefix=NAMESPACE)
    out, _ = process.communicate(timeout=90)
    assert (out, process.returncode) == ("1 0\n", 3)


@needs_namespaces
def test_as_process_1_it_forwards_a_stop_and_commits_before_the_container_dies(start, job: Path, environment) -> None:
    process = start("--", sys.executable, str(job), "25", "wait", prefix=NAMESPACE)
    assert process.stdout.readline() == "recorded\n"
    (child,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(child), signal.SIGTERM)  # what a container runtime does: SIGTERM to process 1 alone
    code, err = ended(process)
    assert (code, "everything that was recorded is committed" in err) == (7, True)
    found = verify(environment["RLK_LEDGER"])
    assert (found.exit_code, found.events) == (0, 28)


def test_the_terminal_is_the_jobs_and_its_interrupt_arrives_once(environment, tmp_path: Path) -> None:
    """Ctrl-C goes to the whole foreground group: a supervisor that passed it on would interrupt the job twice.

    Two that come at once are one to the kernel, so it is done ten times. The job tells its count when it hears SIGUSR1,
    which the supervisor takes from its queue after SIGINT.
    """
    code = (
        "import os, signal, sys\n"
        "count = 0\n"
        "def note(*_):\n    global count\n    count += 1\n"
        "signal.signal(signal.SIGINT, note)\n"
        "signal.signal(signal.SIGUSR1, lambda *_: os.write(1, b'counted %d.' % count))\n"
        "print('ready', sys.stdin.isatty(), flush=True)\n"
        "line = sys.stdin.readline().strip()\n"
        "print('got', line, flush=True)\n"
    )
    pid, fd = pty.fork()
    if pid == 0:
        os.execve(sys.executable, [*RLK, "run", "--", sys.executable, "-c", code], environment)
    seen = b""

    def read(text: bytes) -> bytes:
        nonlocal seen
        while text not in seen:
            seen += os.read(fd, 4096)
        before, _, seen = seen.partition(text)
        return before

    try:
        read(b"ready True")
        for times in range(1, 11):
            os.write(fd, b"\x03")
            read(b"^C")
            os.kill(pid, signal.SIGUSR1)
            read(b"counted ")
            assert int(read(b".")) == times
        os.write(fd, b"hello\n")
        read(b"got hello")
    finally:
        os.close(fd)  # whoever still runs there is hung up on
        os.waitpid(pid, 0)


def test_the_supervisor_is_small_while_the_job_runs(start) -> None:
    """No array library and no reader is loaded beside a job that runs for days."""
    script = "grep VmHWM /proc/$PPID/status; grep -c -E 'numpy|pyarrow|duckdb' /proc/$PPID/maps"
    process = start("--", "sh", "-c", script)
    out, _ = process.communicate(timeout=60)
    peak, heavy = out.splitlines()
    assert int(peak.split()[1]) < 60_000, peak  # kB; it is about 29,000
    assert heavy == "0"


def test_a_disabled_recorder_is_only_run(start, environment, tmp_path: Path) -> None:
    assert ended(start("--", "sh", "-c", "exit 5", env={"RLK_DISABLE": "1"})) == (5, "")
    assert not (tmp_path / "spool").exists()


def test_the_spool_and_ledger_given_are_the_jobs_and_else_nothing_is_set(start, tmp_path: Path) -> None:
    words = ("--", "sh", "-c", "echo $RLK_SPOOL:$RLK_LEDGER")
    given = start("--spool", str(tmp_path / "s"), "--ledger", "L", *words)
    assert given.communicate(timeout=60)[0] == f"{tmp_path / 's'}:L\n"
    kept = start(*words, env={"RLK_SPOOL": "", "RLK_LEDGER": ""})
    assert kept.communicate(timeout=60)[0] == ":\n"
