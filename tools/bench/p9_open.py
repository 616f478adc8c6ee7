"""P9: open a ledger of very many receipts and find one sample by id, with every request counted.

    python tools/bench/p9_open.py [--receipts N] [--local] [--without] [--growth] [--json FILE]

On an S3 server on loopback (SeaweedFS), or in a local folder; each measurement is a fresh process, and its imports are
told apart. The full size is `--receipts 200000`. `--without` opens the same ledger by reading every receipt, `--growth`
goes 1k, 10k, 100k, N.
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

BAR_S = {"s3": 2.0, "local": 0.3}
LISTED_AT_ONCE = 1000


class Counting:
    """A store that counts requests and bytes; a listing counts once per thousand names."""

    def __init__(self, inner: Any, indexes: bool) -> None:
        self.inner, self.url, self.indexes = inner, inner.url, indexes
        self.gets = self.lists = self.heads = self.bytes = 0

    def read(self, path: str) -> bytes:
        """GET."""
        self.gets += 1
        data: bytes = self.inner.read(path)
        self.bytes += len(data)
        return data

    def list(self, prefix: str) -> Iterator[Any]:
        """LIST of everything below a folder."""
        found = list(self.inner.list(prefix))
        self.lists += 1 + len(found) // LISTED_AT_ONCE
        return iter(found)

    def children(self, prefix: str) -> tuple[str, ...]:
        """LIST of a folder's names; of indexes none, when they are not to be used."""
        if prefix.endswith("/index") and not self.indexes:
            return ()
        found: tuple[str, ...] = self.inner.children(prefix)
        self.lists += 1 + len(found) // LISTED_AT_ONCE
        return found

    def stat(self, path: str) -> int | None:
        """HEAD."""
        self.heads += 1
        size: int | None = self.inner.stat(path)
        return size

    def locate(self, path: str) -> str:
        """As the store says it."""
        return str(self.inner.locate(path))


def ask(url: str, indexes: bool) -> None:
    """Opens `url`, finds one sample, prints what it took as JSON: the work of the fresh process."""
    began = time.perf_counter()
    from many_receipts import REAL, RUN, sample_id

    from rlk_ledger import layout
    from rlk_ledger.ledger import Ledger
    from rlk_ledger.store import open_store
    from rlk_ledger_schemas.objects import decode_ledger

    bare = open_store(url)  # imports the client
    start, cpu = time.perf_counter(), time.process_time()
    store = Counting(bare, indexes)
    led = Ledger(store, decode_ledger(store.read(layout.LEDGER)))
    opened = len(led.run(RUN).held)
    held = time.perf_counter()
    wanted = "from logprobs where run_id = $run and sample_id = $id"
    answer = led.sql(
        f"select count(*) as n, sum(len(values__float32)) as tokens {wanted}", {"run": RUN, "id": sample_id(REAL // 2)}
    )
    (row,) = answer.arrow().to_pylist()
    done = time.perf_counter()
    assert row == {"n": 2, "tokens": 512}, row
    counts = {"get": store.gets, "list": store.lists, "head": store.heads, "mb": round(store.bytes / 1e6, 2)}
    took = {"imports_s": start - began, "receipts_s": held - start, "query_s": done - held, "total_s": done - start}
    took["cpu_s"] = time.process_time() - cpu
    print(json.dumps({"receipts": opened, **{k: round(v, 4) for k, v in took.items()}, **counts}))


def fresh(url: str, indexes: bool, environ: dict[str, str]) -> dict[str, Any]:
    """What one fresh process says of opening `url`."""
    command = [sys.executable, __file__, "--ask", url] + ([] if indexes else ["--without"])
    done = subprocess.run(command, env={**os.environ, **environ}, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stderr)
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def measure(receipts: int, local: bool, without: bool, server: Any) -> list[dict[str, Any]]:
    """The rows of one size: with indexes (the best of three), and by reading every receipt when asked."""
    from many_receipts import make

    with tempfile.TemporaryDirectory(prefix="rlk-p9-") as folder:
        began = time.perf_counter()
        objects = make(Path(folder), receipts, max(1, min(100, receipts // 100)))
        url, environ = folder, {}
        if not local:
            url, environ = server.url(f"p9-{receipts}"), server.environ
            server.load(Path(folder), f"p9-{receipts}")
        print(f"{objects} objects made in {time.perf_counter() - began:.0f} s", file=sys.stderr)
        rows = [{"by": "indexes", **min((fresh(url, True, environ) for _ in range(3)), key=lambda r: r["total_s"])}]
        if without:
            rows.append({"by": "every receipt", **fresh(url, False, environ)})
        return rows


def main() -> None:
    """Measures, prints a table, and writes JSON when asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--receipts", type=int, default=10_000)
    parser.add_argument("--local", action="store_true")
    parser.add_argument("--without", action="store_true")
    parser.add_argument("--growth", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--ask", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.ask:
        ask(options.ask, not options.without)
        return
    sizes = [n for n in (1000, 10_000, 100_000) if options.growth and n < options.receipts] + [options.receipts]
    with contextlib.ExitStack() as stack:
        server = None
        if not options.local:
            from store_servers import SeaweedFS

            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="rlk-p9-s3-"))
            server = stack.enter_context(SeaweedFS(Path(folder)))
            os.environ.update(server.environ)
        rows = [row for n in sizes for row in measure(n, options.local, options.without, server)]
    where = "local" if options.local else "s3"
    print(f"P9  open and one sample by id, {where}, bar {BAR_S[where]} s")
    names = ("receipts", "by", "total_s", "receipts_s", "query_s", "cpu_s", "imports_s", "get", "list", "head", "mb")
    print("".join(f"{name:>14}" for name in names))
    for row in rows:
        print("".join(f"{row[name]:>14}" for name in names))
    if options.json:
        options.json.write_text(json.dumps({"row": "P9", "where": where, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
