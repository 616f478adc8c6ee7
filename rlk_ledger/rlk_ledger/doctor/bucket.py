"""Does the ledger's store take what a job writes: reachable, permitted, honouring put-if-absent, with a sane clock?"""

import email.utils
import os
import statistics
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from threading import Thread
from typing import Any
from urllib.parse import urlsplit

from rlk_ledger import layout
from rlk_ledger.buckets import FsspecStore
from rlk_ledger.canary import TWICE, path_of, probe
from rlk_ledger.doctor.check import Check
from rlk_ledger.store import FileStore, Missing, Store, open_store
from rlk_ledger_schemas.errors import ConfigError, RlkError, StoreError
from rlk_ledger_schemas.objects import decode_ledger
from rlk_ledger_sdk.urls import holds_secret

ANSWER_S = 30.0
"""How long a store may take before it counts as not answering."""
_SKEW_S = 5.0
_BAD_SKEW_S = 300.0  # object stores refuse signed requests beyond 15 minutes
_SLOW_MS = 500.0
_READS = 5


def check_url(url: str) -> Check:
    """Whether the URL itself holds a credential: it is written into spools, logs and process lists."""
    if holds_secret(url):
        parts = urlsplit(url)
        shown = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}" if parts.scheme else "the path"
        advice = "put them into the environment or the client's own configuration; replace the credential"
        return Check("ledger url", "fail", f"the ledger URL at {shown} holds a credential", advice)
    return Check("ledger url", "ok", "the ledger URL holds no credential")


def check_bucket(url: str, answer_s: float = ANSWER_S) -> Iterator[Check]:
    """Every check of the store at `url`. Leaves the two small objects of the put-if-absent probe behind."""
    url_check = check_url(url)
    yield url_check
    if url_check.state == "fail":
        yield Check("store", "skipped", "not contacted with a credential in the URL")
        return
    try:
        store = open_store(url)
    except ConfigError as error:
        yield Check("store", "fail", str(error))
        return
    if url.startswith("memory://"):
        yield Check("store", "note", f"{url} lives in one process and ends with it: for tests")
        return
    permitted = _Permitted(store, answer_s)
    yield from permitted.checks()
    if permitted.reachable:
        yield from _answered("clock", lambda: [_skew(store)], answer_s)
        yield from _answered("versioning", lambda: [_versioning(store)], answer_s)


class _Permitted:
    """The verbs a job needs, each tried and named. `reachable` says whether any of them was answered."""

    def __init__(self, store: Store, answer_s: float) -> None:
        self.store = store
        self.reachable = False
        self._written = False
        self._answer_s = answer_s

    def checks(self) -> Iterator[Check]:
        """get, put, put-if-absent, list, latency; stops where the store does not answer at all."""
        get = list(_answered("bucket get", self._get, self._answer_s))
        yield from get
        if get[0].state == "unknown":
            yield Check(
                "store", "fail", f"{self.store.url} does not answer", "check the endpoint, network and credentials"
            )
            return
        yield from self._noted("bucket put", self._put)
        yield from self._noted("bucket list", self._list)
        if self._written:
            yield from _answered("bucket latency", self._latency, self._answer_s)

    def _noted(self, name: str, check: Callable[[], list[Check]]) -> Iterator[Check]:
        for one in _answered(name, check, self._answer_s):
            self.reachable = self.reachable or one.state == "ok"
            yield one

    def _get(self) -> list[Check]:
        try:
            data = self.store.read(layout.LEDGER)
        except Missing:
            self.reachable = True
            return [Check("bucket get", "ok", f"{self.store.url} is answered; no ledger is there yet")]
        except StoreError as error:
            return [
                Check(
                    "bucket get", "fail", str(error), _advice(error, "the job needs to read objects below its prefix")
                )
            ]
        self.reachable = True
        ledger = decode_ledger(data, layout.LEDGER)
        out = [Check("bucket get", "ok", f"ledger {ledger.ledger_id} (format {ledger.format}) was read")]
        if ledger.put_if_absent == "ignored":
            text = "this ledger was begun on a store that ignored put-if-absent: strict runs refuse it"
            out.append(Check("ledger", "warn", text, "begin a new ledger on a store with conditional writes"))
        return out

    def _put(self) -> list[Check]:
        try:
            honoured = probe(self.store)
        except StoreError as error:
            return [
                Check("bucket put", "fail", str(error), _advice(error, "the job needs to put objects below its prefix"))
            ]
        self._written = True
        put = Check("bucket put", "ok", f"two small objects stand below {layout.CANARY}/ and read back as written")
        if honoured == "honoured":
            return [
                put,
                Check("put-if-absent", "ok", "an object that is there is not overwritten, not in a race either"),
            ]
        text = (
            "the store overwrites objects it was told to create only: two shippers could replace each other's receipts"
        )
        return [put, Check("put-if-absent", "fail", text, "use a store with conditional writes")]

    def _list(self) -> list[Check]:
        try:
            names = self.store.children("")
        except StoreError as error:
            return [Check("bucket list", "fail", str(error), _advice(error, "the job needs to list its prefix"))]
        return [Check("bucket list", "ok", f"the prefix can be listed ({len(names)} names at its top)")]

    def _latency(self) -> list[Check]:
        took = []
        for _ in range(_READS):
            began = time.perf_counter()
            self.store.read(path_of(TWICE))
            took.append(1000 * (time.perf_counter() - began))
        middle = statistics.median(took)
        text = f"a small read takes {middle:.1f} ms (median of {_READS}, {min(took):.1f} to {max(took):.1f})"
        if middle > _SLOW_MS:
            return [Check("bucket latency", "warn", text, "use a bucket in the job's region; flushes wait for it")]
        return [Check("bucket latency", "ok", text)]


def _advice(error: StoreError, right: str) -> str | None:
    """What to do about a call that failed: a right is lacking, unless the error says that it is something else."""
    text = str(error)
    if "bucket does not exist" in text:
        return "check the URL and the endpoint; a job makes no bucket"
    if "credentials in use are refused" in text:
        return "check which credentials this process finds (AWS_PROFILE, a role, an expired token)"
    return None if "; check the network" in text or "; set " in text else right


def _answered(name: str, check: Callable[[], list[Check]], answer_s: float) -> list[Check]:
    """What `check` says, or `unknown` when it says nothing in `answer_s` seconds. A call that hangs is left behind."""
    future: Future[list[Check]] = Future()

    def run() -> None:
        try:
            future.set_result(check())
        except BaseException as error:
            future.set_exception(error)

    Thread(target=run, name=f"doctor {name}", daemon=True).start()
    try:
        return future.result(answer_s)
    except TimeoutError:
        return [Check(name, "unknown", f"no answer within {answer_s:g} s", "check the endpoint and the network")]
    except RlkError as error:
        return [Check(name, "fail", str(error))]
    except Exception as error:
        return [Check(name, "unknown", f"it could not be told: {type(error).__name__}: {error}")]


def _skew(store: Store) -> Check:
    """Wall clock here against the store's: receipts carry this one, and signed requests need both to agree."""
    before = time.time()
    there = store_clock(store)
    if there is None:
        return Check("clock", "unknown", "the store gives no time of its own to compare with", "compare with NTP")
    seconds, resolution = there
    after = time.time()
    ahead = before - seconds - resolution if before > seconds + resolution else min(0.0, after - seconds)
    text = f"this machine's clock and the store's differ by {abs(ahead):.1f} s" + (
        f" (here it is {'later' if ahead > 0 else 'earlier'})" if ahead else ""
    )
    if abs(ahead) > _BAD_SKEW_S:
        return Check("clock", "fail", text, "set this machine's clock (chrony, ntpd)")
    if abs(ahead) > _SKEW_S:
        return Check("clock", "warn", text, "wall times of events are off by that much; their order is not")
    return Check("clock", "ok", text)


def store_clock(store: Store) -> tuple[float, float] | None:
    """(seconds since the epoch, resolution in seconds) of the store's own clock; None where it gives none."""
    if isinstance(store, FileStore):
        return _file_clock(store)
    endpoint = _endpoint(store.fs) if isinstance(store, FsspecStore) else None
    return http_clock(endpoint) if endpoint is not None else None


def http_clock(endpoint: str) -> tuple[float, float] | None:
    """The `Date` of an HTTP server's answer to an unsigned request; None where it does not answer or gives none."""
    try:
        with urllib.request.urlopen(urllib.request.Request(endpoint, method="HEAD"), timeout=10) as reply:
            date = reply.headers.get("Date")
    except urllib.error.HTTPError as error:  # refused, as it is unsigned; the refusal has a date too
        date = error.headers.get("Date")
        error.close()
    except OSError:
        return None
    return (email.utils.parsedate_to_datetime(date).timestamp(), 1.0) if date else None


def _file_clock(store: FileStore) -> tuple[float, float]:
    """The time the file system gives a file written now; a network file system's server has its own."""
    there = store.root
    while not there.is_dir():
        there = there.parent
    with tempfile.NamedTemporaryFile(dir=there, prefix=".doctor.", suffix=".tmp") as file:
        file.write(b"x")
        file.flush()
        return os.fstat(file.fileno()).st_mtime, 0.01


def _endpoint(fs: Any) -> str | None:
    """The HTTP address a client talks to, without asking with its credentials; None for other clients."""
    protocols = {fs.protocol} if isinstance(fs.protocol, str) else set(fs.protocol)
    if protocols & {"s3", "s3a"}:
        client = getattr(fs, "_s3", None) or fs.s3
        return str(client.meta.endpoint_url)
    if protocols & {"gs", "gcs"}:
        return str(fs.base)
    if protocols & {"az", "abfs", "abfss"}:
        return str(fs.service_client.url)
    return None


def _versioning(store: Store) -> Check:
    """Whether the store itself keeps what is overwritten or deleted; only where the client and the rights tell."""
    fs = store.fs if isinstance(store, FsspecStore) else None
    if fs is None or "s3" not in (fs.protocol if isinstance(fs.protocol, tuple) else (fs.protocol,)):
        return Check("versioning", "note", "versioning and object lock cannot be told for this kind of store")
    bucket = fs.split_path(store.url)[0]
    try:
        status = fs.call_s3("get_bucket_versioning", Bucket=bucket).get("Status", "off")
    except Exception as error:
        return Check("versioning", "note", f"it cannot be told with these rights ({type(error).__name__})")
    try:
        lock = fs.call_s3("get_object_lock_configuration", Bucket=bucket)
        locked = lock.get("ObjectLockConfiguration", {}).get("ObjectLockEnabled", "off")
    except Exception:
        locked = "off or hidden"
    return Check("versioning", "note", f"bucket {bucket}: versioning {status}, object lock {locked}")
