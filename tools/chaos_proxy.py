"""A TCP proxy that treats what passes through it as a bad network would, by seed and by command.

    python tools/chaos_proxy.py 8333 [--port 9000] [--seed 7] [--mood chaos]     (then type a mood and Enter)

    with ChaosProxy(server_port, seed=7) as proxy:
        client.connect("127.0.0.1", proxy.port)
        proxy.mood = "chaos"

A fate is drawn for every exchange (a request and its reply on a connection that may carry many):

    pass       forwarded as it is
    delay      forwarded after up to `Mood.delay_s`
    drop       closed before the server saw the request
    lose       the server did its work; the connection closes instead of the reply
    reset      the same, with a TCP reset
    truncate   part of the reply, then the connection closes
    hole       the request is swallowed and the connection stays silent for `Mood.hole_s`, then closes
    late       the server did its work; its reply is swallowed, the connection stays silent for `Mood.hole_s`

`proxy.fates` counts them. A mood may change at any time and holds for the exchanges that begin after that.
"""

import argparse
import asyncio
import contextlib
import random
import socket
import struct
import sys
import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Self

_CHUNK = 1 << 16


@dataclass(frozen=True)
class Mood:
    """How likely each fate is for an exchange (`pass` has the rest), and how long delays and holes are in seconds."""

    chances: Mapping[str, float] = field(default_factory=dict)
    delay_s: float = 0.3
    hole_s: float = 2.0


_EVERY = {"delay": 0.10, "drop": 0.04, "lose": 0.04, "reset": 0.04, "truncate": 0.04, "hole": 0.01, "late": 0.01}
MOODS: Mapping[str, Mood] = MappingProxyType(
    {
        "calm": Mood(),
        "chaos": Mood(_EVERY),
        "slow": Mood({"delay": 1.0}),
        "drop": Mood({"drop": 1.0}),
        "lose": Mood({"lose": 1.0}),
        "reset": Mood({"reset": 1.0}),
        "truncate": Mood({"truncate": 1.0}),
        "black-hole": Mood({"hole": 1.0}, hole_s=3600.0),
        "late": Mood({"late": 1.0}, hole_s=3600.0),
    }
)


class ChaosProxy:
    """Forwards connections to `target_port` on 127.0.0.1, in its own thread; `port` is where it listens."""

    def __init__(self, target_port: int, seed: int = 0, port: int = 0, mood: "str | Mood" = "calm") -> None:
        self.target_port = target_port
        self.port = port
        self.fates: Counter[str] = Counter()
        self.open = 0
        """Connections that clients hold open now."""
        self._chance = random.Random(seed)
        self._mood = _mood(mood)
        self._ready = threading.Event()
        self._failed: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="chaos-proxy", daemon=True)

    @property
    def mood(self) -> Mood:
        """The mood of exchanges that begin now; set it to a Mood or to the name of one in MOODS."""
        return self._mood

    @mood.setter
    def mood(self, mood: "str | Mood") -> None:
        self._mood = _mood(mood)

    def start(self) -> Self:
        """Listens; returns itself. Raises OSError when the port is taken."""
        self._loop = asyncio.new_event_loop()
        self._thread.start()
        self._ready.wait()
        if self._failed is not None:
            raise self._failed
        return self

    def stop(self) -> None:
        """Closes every connection and the port."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stopped.set)
            self._thread.join()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    # -- in the proxy's thread ---------------------------------------------------------------------------------------

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._serve())
        finally:
            self._loop.close()

    async def _serve(self) -> None:
        self._stopped = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        try:
            server = await asyncio.start_server(self._accepted, "127.0.0.1", self.port)
        except OSError as error:
            self._failed = error
            self._ready.set()
            return
        self.port = server.sockets[0].getsockname()[1]
        self._ready.set()
        await self._stopped.wait()
        server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self.open += 1
        try:
            await _Connection(self, reader, writer).run()
        except (OSError, asyncio.CancelledError):
            pass  # a side went away, or the proxy stops: both end the connection
        finally:
            self.open -= 1
            self._tasks.discard(task)
            writer.transport.abort()

    def draw(self) -> tuple[str, Mood, float]:
        """The fate of the next exchange, the mood it was drawn in and a number in [0, 1) to shape it."""
        mood, at = self._mood, self._chance.random()
        fate = "pass"
        for name, chance in mood.chances.items():
            at -= chance
            if at < 0:
                fate = name
                break
        self.fates[fate] += 1
        return fate, mood, self._chance.random()


class _Connection:
    """One client's connection and the one to the server behind it."""

    def __init__(self, proxy: ChaosProxy, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._proxy = proxy
        self._client, self._to_client = reader, writer
        self._fate, self._mood, self._share = "pass", proxy.mood, 0.0
        self._replied = True  # the next bytes of the client begin an exchange

    async def run(self) -> None:
        server, to_server = await asyncio.open_connection("127.0.0.1", self._proxy.target_port)
        ways = [
            asyncio.ensure_future(self._requests(to_server)),
            asyncio.ensure_future(self._replies(server)),
        ]
        try:
            done, _ = await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            for way in done:
                way.result()
        finally:
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)
            to_server.transport.abort()

    async def _requests(self, to_server: asyncio.StreamWriter) -> None:
        while data := await self._client.read(_CHUNK):
            if self._replied:
                self._replied = False
                self._fate, self._mood, self._share = self._proxy.draw()
                if self._fate == "delay":
                    await asyncio.sleep(self._mood.delay_s * self._share)
            if self._fate == "drop":
                return
            if self._fate == "hole":
                await asyncio.sleep(self._mood.hole_s)
                return
            to_server.write(data)
            await to_server.drain()
        if self._fate in ("lose", "reset", "truncate", "late"):
            await asyncio.sleep(self._mood.hole_s)  # the client half-closed; the reply decides

    async def _replies(self, server: asyncio.StreamReader) -> None:
        while data := await server.read(_CHUNK):
            if self._fate == "lose":
                return
            if self._fate == "reset":
                self._reset()
                return
            if self._fate == "late":
                await asyncio.sleep(self._mood.hole_s)
                return
            if self._fate == "truncate":
                self._to_client.write(data[: int(len(data) * self._share)])
                await self._to_client.drain()
                self._to_client.close()
                await self._to_client.wait_closed()
                return
            self._replied = True
            self._to_client.write(data)
            await self._to_client.drain()

    def _reset(self) -> None:
        """Ends the client's connection with RST instead of FIN."""
        inner = self._to_client.get_extra_info("socket")
        with contextlib.suppress(OSError):
            inner.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def _mood(mood: "str | Mood") -> Mood:
    if isinstance(mood, Mood):
        return mood
    if mood not in MOODS:
        raise ValueError(f"unknown mood {mood!r}; one of {', '.join(MOODS)}.")
    return MOODS[mood]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", type=int, help="the server's port on 127.0.0.1")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--mood", choices=sorted(MOODS), default="calm")
    options = parser.parse_args()
    with ChaosProxy(options.target, options.seed, options.port, options.mood) as proxy:
        print(f"127.0.0.1:{proxy.port} -> 127.0.0.1:{options.target}; moods: {', '.join(MOODS)}", flush=True)
        for line in sys.stdin:
            with contextlib.suppress(ValueError):
                proxy.mood = line.strip() or "calm"
            print(dict(proxy.fates), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
