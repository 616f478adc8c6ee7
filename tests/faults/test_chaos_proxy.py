"""The proxy does what each of its moods says: a fault test behind a proxy that forwards everything proves nothing."""

import contextlib
import socket
import threading
from collections.abc import Iterator

import pytest
from chaos_proxy import MOODS, ChaosProxy, Mood

BODY = b"x" * 1000


class Echo:
    """A server that answers every four bytes with BODY and counts them."""

    def __init__(self) -> None:
        self.requests = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError), connection:
            while connection.recv(4, socket.MSG_WAITALL):
                self.requests += 1
                connection.sendall(BODY)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._thread.join()
        self._listener.close()


@pytest.fixture
def echo() -> Iterator[Echo]:
    server = Echo()
    yield server
    server.close()


def ask(port: int, times: int = 1, timeout: float = 60.0) -> bytes:
    """What `times` requests on one connection are answered with, up to its end."""
    out = b""
    with socket.create_connection(("127.0.0.1", port), timeout=timeout) as connection:
        for _ in range(times):
            connection.sendall(b"ping")
            wanted = len(out) + len(BODY)
            while len(out) < wanted:
                data = connection.recv(wanted - len(out))
                if not data:
                    return out
                out += data
    return out


def test_calm_and_slow_forward_everything(echo: Echo) -> None:
    with ChaosProxy(echo.port) as proxy:
        assert ask(proxy.port, 5) == BODY * 5
        proxy.mood = "slow"
        assert ask(proxy.port, 2) == BODY * 2
        assert proxy.fates == {"pass": 5, "delay": 2}


@pytest.mark.parametrize(("mood", "served"), [("drop", 0), ("lose", 1), ("truncate", 1)])
def test_a_lost_exchange_ends_without_its_reply(echo: Echo, mood: str, served: int) -> None:
    with ChaosProxy(echo.port, mood=mood) as proxy:
        assert len(ask(proxy.port)) < len(BODY)
    assert echo.requests == served, "what the server saw is what tells `drop` from `lose`"


def test_a_reset_is_a_reset(echo: Echo) -> None:
    with ChaosProxy(echo.port, mood="reset") as proxy, pytest.raises(ConnectionResetError):
        ask(proxy.port)
    assert echo.requests == 1


@pytest.mark.parametrize(("mood", "served"), [("black-hole", 0), ("late", 1)])
def test_a_hole_answers_nothing_and_lets_others_pass_later(echo: Echo, mood: str, served: int) -> None:
    with ChaosProxy(echo.port, mood=mood) as proxy:
        with pytest.raises(TimeoutError):
            ask(proxy.port, timeout=0.3)
        assert echo.requests == served
        proxy.mood = "calm"
        assert ask(proxy.port) == BODY


def test_a_mood_holds_for_the_next_exchange_of_an_open_connection(echo: Echo) -> None:
    with ChaosProxy(echo.port) as proxy, socket.create_connection(("127.0.0.1", proxy.port), timeout=60) as connection:
        connection.sendall(b"ping")
        assert len(connection.recv(len(BODY), socket.MSG_WAITALL)) == len(BODY)
        proxy.mood = "drop"
        connection.sendall(b"ping")
        assert connection.recv(1) == b""


def test_the_same_seed_draws_the_same_fates() -> None:
    def drawn(seed: int) -> list[str]:
        proxy = ChaosProxy(1, seed, mood=Mood(dict.fromkeys(("drop", "lose", "reset"), 0.3)))
        return [proxy.draw()[0] for _ in range(200)]

    assert drawn(1) == drawn(1) != drawn(2)
    assert set(drawn(1)) == {"drop", "lose", "reset", "pass"}


def test_a_server_that_is_down_ends_the_connection(echo: Echo) -> None:
    echo.close()
    with ChaosProxy(echo.port) as proxy, contextlib.suppress(ConnectionError):
        assert ask(proxy.port) == b""


def test_an_unknown_mood_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown mood 'angry'"):
        ChaosProxy(1).mood = "angry"
    assert set(MOODS) >= {"calm", "chaos", "black-hole"}
