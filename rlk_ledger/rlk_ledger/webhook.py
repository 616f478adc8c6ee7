"""Posting findings to a URL beside other work: a thread, a bounded queue, retries, never a wait for whoever sends."""

import contextlib
import http.client
import queue
import threading
import time
import urllib.error
import urllib.request
from typing import Any
from urllib.parse import urlsplit

import msgspec

from rlk_ledger_schemas.errors import ConfigError

_WAITING = 1000
_TRIES = 5
_TIMEOUT_S = 5.0


class Webhook:
    """Posts one JSON document each to `url`, in order; use as a context manager.

    A reply of 2xx is delivery. Anything else is tried again, 5 times in all, waiting `pause_s` seconds at first and
    twice as long each time; then the document is given up. `delivered` and `failed` count, `last_error` is the newest
    failure. Raises ConfigError for a URL that is not http or https.
    """

    def __init__(self, url: str, pause_s: float = 0.5) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"the webhook {parts.scheme or url!r} is no http:// or https:// URL.")
        self._url, self._pause = url, pause_s
        self._queue: queue.Queue[Any] = queue.Queue(_WAITING)
        self._end = threading.Event()
        self.sent = self.delivered = self.given_up = 0
        self.last_error: str | None = None
        self._thread = threading.Thread(target=self._work, name="rlk-webhook", daemon=True)

    def __enter__(self) -> "Webhook":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def failed(self) -> int:
        """Documents that did not arrive: given up so far, and after the end all that were not delivered."""
        return self.sent - self.delivered if self._end.is_set() else self.given_up

    def send(self, document: dict[str, Any]) -> None:
        """Queues a document; a full queue gives it up. Returns at once."""
        self.sent += 1
        try:
            self._queue.put_nowait(document)
        except queue.Full:
            self.given_up += 1
            self.last_error = f"{_WAITING} documents were waiting already"

    def close(self, timeout_s: float = 10.0) -> None:
        """Waits at most so long for what is queued, then ends."""
        deadline = time.monotonic() + timeout_s
        while self.delivered + self.given_up < self.sent and time.monotonic() < deadline:
            time.sleep(0.02)
        self._end.set()
        with contextlib.suppress(queue.Full):
            self._queue.put_nowait(None)
        self._thread.join(max(0.1, deadline - time.monotonic()))

    def _work(self) -> None:
        while not self._end.is_set():
            document = self._queue.get()
            if document is not None:
                self._deliver(msgspec.json.encode(document))

    def _deliver(self, body: bytes) -> None:
        pause = self._pause
        for number in range(_TRIES):
            if number and self._end.wait(pause):
                break
            pause = pause * 2 if number else pause
            error = self._post(body)
            if error is None:
                self.delivered += 1
                return
            self.last_error = error
        self.given_up += 1

    def _post(self, body: bytes) -> str | None:
        """What went wrong, None when it was delivered; the URL is not told: it may hold a secret."""
        headers = {"Content-Type": "application/json", "User-Agent": "rlk-ledger"}
        request = urllib.request.Request(self._url, body, headers, method="POST")
        try:
            with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as reply:
                return None if 200 <= reply.status < 300 else f"status {reply.status}"
        except urllib.error.HTTPError as error:
            return f"status {error.code}"
        except (OSError, http.client.HTTPException, ValueError) as error:
            return str(getattr(error, "reason", None) or error or type(error).__name__)
