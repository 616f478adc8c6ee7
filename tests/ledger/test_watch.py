"""`watch`: a run while it records is read once, whatever the store does, and what it raises is passed on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from waiting import wait_for

from rlk_ledger.build import build, event
from rlk_ledger.cli import main
from rlk_ledger.ledger import Ledger, open_ledger
from rlk_ledger.watching import Watch
from rlk_ledger.webhook import Webhook
from rlk_ledger_schemas.errors import ConfigError, StoreError
from rlk_ledger_schemas.fingerprints import contract_id

RUN = "r1"
TOKENS = 16
PER_STEP = 8
BODY = {"temperature": 1.0, "mode": "processed"}
CONTRACT = contract_id("logprob", "1", BODY)


class Job:
    """A job that ships one segment at a time: `step(n)` is a step's samples and both sides' scores of them."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.number: dict[str, int] = {}
        opened: list[tuple[str, str, dict[str, Any]]] = []
        for side in ("rollout", "training"):
            opened.append((side, "writer.opened", {"role": side, "rank": 0, "world_size": 1}))
            opened.append((side, "contract.declared", {"kind": "logprob", "version": "1", "body": BODY}))
        self.ship(opened)

    def ship(self, told: list[tuple[str, str, dict[str, Any]]]) -> None:
        records = []
        for writer, kind, fields in told:
            seq = self.number[writer] = self.number.get(writer, -1) + 1
            records.append(event(RUN, writer, seq, kind, **fields))
        build(self.url, RUN, records, roles={"rollout": 1, "training": 1})

    def step(self, step: int, train: bool = True, bad: float | None = None) -> None:
        rng = np.random.default_rng(step)
        told: list[tuple[str, str, dict[str, Any]]] = []
        for i in range(PER_STEP):
            r = (-0.2 - rng.exponential(1.0, TOKENS)).astype(np.float32)
            t = (r + rng.normal(0, 0.01, TOKENS)).astype(np.float32)
            if bad is not None:
                t[3] = bad
            body = {"sample_id": f"s{step}-{i}", "step": step}
            spans = [{"version": "v", "start": 0, "end": TOKENS}]
            ids = rng.integers(0, 99, TOKENS).tolist()
            told.append(("rollout", "rollout.sample", {**body, "response_token_ids": ids, "loss_mask": [1] * TOKENS,
                                                       "weight_spans": spans}))  # fmt: skip
            for side, values in (("rollout", r), ("training", t)):
                if side == "rollout" or train:
                    scored = {"source": side, "values": values.tolist(), "contract_id": CONTRACT, "weight_version": "v"}
                    told.append((side, "logprobs", {**body, **scored}))
        self.ship(told)


class Counting:
    """A store that counts what is read of it, and fails or lies while told to."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.url = inner, inner.url
        self.reads: list[str] = []
        self.down = False
        self.cut: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        def call(path: str, *rest: Any) -> Any:
            if self.down:
                raise StoreError("the bucket is away.")
            found = getattr(self.inner, name)(path, *rest)
            if name == "read":
                self.reads.append(path)
                if self.cut and path.endswith(".parquet"):
                    return found[: len(found) // 2]
            return found

        return call


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(str(tmp_path / "ledger"))


@pytest.fixture
def store(job: Job) -> Counting:
    return Counting(open_ledger(job.url).store)


@pytest.fixture
def watched(job: Job, store: Counting) -> Watch:
    return Watch(Ledger(store, open_ledger(job.url).info), RUN)


def segments(store: Counting) -> list[str]:
    return [path for path in store.reads if path.endswith(".parquet") and "/index/" not in path]


def test_every_segment_is_read_once_and_a_look_at_nothing_new_reads_none(
    job: Job, store: Counting, watched: Watch
) -> None:
    for step in range(5):
        job.step(step)
        assert watched.look()
    assert len(segments(store)) == len(set(segments(store))) == 6
    before = len(store.reads)
    assert not watched.look()
    assert len(store.reads) - before <= 3, "one receipt per chain is asked for, nothing is read again"
    watched.judge(force=True)
    assert (watched.state.samples, watched.state.compared) == (5 * PER_STEP, 5 * PER_STEP * TOKENS)
    assert watched.state.coverage == 1.0


def test_what_a_watch_has_seen_is_what_a_reader_of_the_whole_run_sees(job: Job, watched: Watch) -> None:
    from rlk_ledger.audit import audit
    from rlk_ledger.history import load_history

    for step in range(4):
        job.step(step, bad=float("nan") if step == 2 else None)
        watched.look()
    watched.judge(force=True)
    whole = audit(load_history(open_ledger(job.url), RUN))
    assert [f.finding_id for f in watched.state.findings] == [f.finding_id for f in whole.findings]
    assert watched.state.drift["abs_dlogp_mean"] == whole.summary["drift"]["metrics"]["abs_dlogp_mean"]


def test_samples_training_has_not_reached_wait_and_are_not_missing(job: Job, watched: Watch) -> None:
    job.step(0)
    job.step(1)
    job.step(2, train=False)
    job.step(3, train=False)
    watched.look()
    found = watched.judge(force=True)
    assert (watched.state.lag, watched.state.waiting) == (2, 2 * PER_STEP)
    assert not [f for f in found if f.finding_id == "coverage.unobserved"]
    job.step(4)
    watched.look()
    found = watched.judge(force=True)
    assert [f.where.get("samples", f.evidence) for f in found if f.finding_id == "coverage.unobserved"]


def test_an_outage_is_waited_out_and_nothing_is_lost_or_seen_twice(job: Job, store: Counting, watched: Watch) -> None:
    job.step(0)
    watched.look()
    job.step(1)
    store.down = True
    for _ in range(3):
        assert not watched.look()
        assert watched.state.trouble == "the bucket is away."
    store.down = False
    assert watched.look()
    assert (watched.state.trouble, watched.state.samples) == (None, 2 * PER_STEP)


def test_a_segment_that_is_not_whole_yet_is_asked_for_again(job: Job, store: Counting, watched: Watch) -> None:
    watched.look()
    job.step(0)
    store.cut = {"all"}
    watched.look()
    assert (watched.state.samples, watched.state.unread) == (0, 1)
    store.cut = set()
    assert watched.look()
    assert (watched.state.samples, watched.state.unread, watched.state.lost) == (PER_STEP, 0, 0)


def test_memory_is_bounded_by_the_window(job: Job, store: Counting) -> None:
    watched = Watch(Ledger(store, open_ledger(job.url).info), RUN, window=3 * PER_STEP)
    for step in range(6):
        job.step(step)
        watched.look()
        watched.judge(force=True)
    assert (watched.state.samples, watched.state.held) == (6 * PER_STEP, 3 * PER_STEP)
    assert watched.state.compared == 3 * PER_STEP * TOKENS


def test_a_finding_is_raised_once_however_it_grows(job: Job, watched: Watch) -> None:
    raised = []
    for step in range(4):
        job.step(step, bad=float("nan"))
        watched.look()
        raised += [f.finding_id for f in watched.judge(force=True)]
    assert raised.count("values.nan") == 1


def test_once_prints_one_document_and_exits_as_the_findings_say(job: Job, capsys: Any) -> None:
    job.step(0)
    code = main(["watch", RUN, "--ledger", job.url, "--once", "--json"])
    document = json.loads(capsys.readouterr().out)
    assert (document["samples"], document["compared_tokens"]) == (PER_STEP, PER_STEP * TOKENS)
    assert code == (3 if document["findings"] else 0)
    job.step(1, bad=float("nan"))
    assert main(["watch", RUN, "--ledger", job.url, "--once"]) == 1
    out = capsys.readouterr().out
    assert "error: values.nan" in out
    assert "\x1b" not in out


def test_once_without_a_run_and_a_misspelt_finding_are_one_sentence(job: Job, capsys: Any) -> None:
    assert main(["watch", "nope", "--ledger", job.url, "--once"]) == 2
    assert "no run 'nope'" in capsys.readouterr().err
    assert main(["watch", RUN, "--ledger", job.url, "--once", "--exit-on", "drift.splitt"]) == 2
    assert "did you mean 'drift.split'?" in capsys.readouterr().err
    assert main(["watch", RUN, "--ledger", job.url, "--once", "--webhook", "ftp://x"]) == 2


def test_exit_on_ends_the_watch_when_the_finding_is_raised(job: Job, tmp_path: Path) -> None:
    job.step(0)
    with running(job, tmp_path, "--exit-on", "values.nan") as watch:
        wait_for(lambda: "samples 8" in (tmp_path / "out").read_text())
        assert watch.poll() is None
        job.step(1, bad=float("nan"))
        assert watch.wait(30) == 1
    assert (tmp_path / "err").read_text() == ""


def test_a_signal_ends_the_watch_in_order_and_a_run_may_begin_after_it(job: Job, tmp_path: Path) -> None:
    with running(job, tmp_path, "--json", run="later") as watch:
        wait_for(lambda: (tmp_path / "out").read_text().count("\n") >= 1)
        watch.send_signal(signal.SIGINT)
        assert watch.wait(30) == 0
    lines = [json.loads(line) for line in (tmp_path / "out").read_text().splitlines()]
    assert (lines[0]["there"], (tmp_path / "err").read_text()) == (False, "")


class running:
    """`rlk-ledger watch` as a process of its own, its output in files."""

    def __init__(self, job: Job, folder: Path, *options: str, run: str = RUN) -> None:
        code = "import sys; from rlk_ledger.cli import main; sys.exit(main(sys.argv[1:]))"
        self.words = [sys.executable, "-c", code, "watch", run, "--ledger", job.url, "--interval", "0.1", *options]
        self.files = [(folder / name).open("w") for name in ("out", "err")]

    def __enter__(self) -> subprocess.Popen[bytes]:
        self.process = subprocess.Popen(self.words, stdout=self.files[0], stderr=self.files[1], env={**os.environ})
        return self.process

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        for file in self.files:
            file.close()


@pytest.fixture
def server() -> Iterator[Callable[..., tuple[str, list[Any]]]]:
    """Starts a web server that answers the given statuses in turn (then 200); gives its URL and what it got."""
    started: list[HTTPServer] = []

    def start(*statuses: int) -> tuple[str, list[Any]]:
        got: list[Any] = []
        rest = list(statuses)

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                status = rest.pop(0) if rest else 200
                got.append((status, json.loads(body)))
                self.send_response(status)
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        made = HTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=made.serve_forever, daemon=True).start()
        started.append(made)
        return f"http://127.0.0.1:{made.server_port}/hook", got

    yield start
    for one in started:
        one.shutdown()
        one.server_close()


def test_each_new_finding_is_posted_once_and_again_after_a_failure(job: Job, capsys: Any, server: Any) -> None:
    url, got = server(500, 503)
    job.step(0, bad=float("nan"))
    assert main(["watch", RUN, "--ledger", job.url, "--once", "--webhook", url]) == 1
    posted = [body for status, body in got if status == 200]
    assert [body["finding_id"] for body in posted].count("values.nan") == 1
    assert {"run_id", "severity", "where", "evidence", "next_step"} <= posted[0].keys()
    assert [status for status, _ in got][:3] == [500, 503, 200]
    capsys.readouterr()


def test_a_webhook_that_never_answers_does_not_hold_the_sender_up_and_is_counted() -> None:
    with Webhook("http://127.0.0.1:9/", pause_s=0.001) as hook:
        for number in range(3):
            hook.send({"n": number})
        assert hook.sent == 3
    assert (hook.delivered, hook.failed) == (0, 3)
    assert hook.last_error is not None
    with pytest.raises(ConfigError, match="no http"):
        Webhook("file:///etc/passwd")


def test_a_watch_follows_a_bucket_as_it_follows_a_folder() -> None:
    job = Job("memory://watched/ledger")
    watched = Watch(open_ledger(job.url), RUN)
    for step in range(2):
        job.step(step)
        assert watched.look()
    assert watched.state.samples == 2 * PER_STEP
