"""Flips one random bit of one random object of a ledger, and demands that verify finds it and names the object.

    python tools/flip_bits.py COUNT [--seed N]

COUNT flips in a ledger without keys and as many in a signed one, each put back before the next. The ledgers have every
kind of object: ledger.json, run.json, canaries, receipts, segments, checkpoints, indexes, a seal, a hold and its
release. Prints per kind how many were flipped and found; exits with 1 when one was not, and says which.
"""

import argparse
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from rlk_ledger import checkpoints, holds, layout, seals, signing
from rlk_ledger.build import event
from rlk_ledger.canary import probe
from rlk_ledger.chain import Chain
from rlk_ledger.contact import meet
from rlk_ledger.ledger import Run
from rlk_ledger.records import Record
from rlk_ledger.signing import Signer
from rlk_ledger.store import AlreadyThere, Entry, Missing
from rlk_ledger.verify import verify
from rlk_ledger_schemas.objects import FORMAT, RunInfo

RUN = "r1"
WRITERS = ("0a" * 16, "0b" * 16, "0c" * 16)
_PER_SEGMENT = 5


class MemoryStore:
    """A bucket in a dict; `objects` may be changed behind its back, which is what it is for."""

    url = "memory://flips"

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}

    def create(self, path: str, data: bytes) -> None:
        """Puts `data` there once; raises AlreadyThere for other bytes."""
        if self.objects.setdefault(path, data) != data:
            raise AlreadyThere(f"{path} already holds other bytes.")

    def read(self, path: str) -> bytes:
        """The object; raises Missing."""
        try:
            return self.objects[path]
        except KeyError:
            raise Missing(f"{path} does not exist.") from None

    def list(self, prefix: str) -> Iterator[Entry]:
        """Every object below the folder, sorted."""
        start = f"{prefix}/" if prefix else ""
        return iter(sorted(Entry(path, len(data)) for path, data in self.objects.items() if path.startswith(start)))

    def children(self, prefix: str) -> tuple[str, ...]:
        """Names directly below the folder."""
        start = f"{prefix}/" if prefix else ""
        return tuple(sorted({p.removeprefix(start).partition("/")[0] for p in self.objects if p.startswith(start)}))

    def stat(self, path: str) -> int | None:
        """The object's size, None without one."""
        return len(self.objects[path]) if path in self.objects else None

    def locate(self, path: str) -> str:
        """The object's name for people."""
        return f"{self.url}/{path}"

    def delete(self, path: str) -> None:
        """Removes the object."""
        self.objects.pop(path, None)


class Flipped(NamedTuple):
    """One flip: which object, which bit, and what is wrong with what verify said of it; None where it was right."""

    path: str
    bit: int
    missed: str | None


def _life(writer: str, role: str, rank: int) -> list[Record]:
    out = [event(RUN, writer, 0, "writer.opened", role=role, rank=rank, world_size=2)]
    for seq in range(1, 7):
        values = [float("nan"), -0.0, -1.5 - seq]
        fields = {"sample_id": f"s{seq}", "source": "rollout", "contract_id": "c", "values": values}
        out.append(event(RUN, writer, seq, "logprobs", step=seq, **fields))
    return [*out, event(RUN, writer, 7, "writer.closed", reason="done")]


def make_ledger(signer: Signer | None = None) -> MemoryStore:
    """A sealed and held run of two chains, two checkpoints and their indexes, signed when a key is given."""
    store = MemoryStore()
    declared = RunInfo(
        format=FORMAT,
        ledger_id="",
        run_id=RUN,
        roles={"rollout": 2, "training": 1},
        mode={},
        redaction="none",
        created_us=0,
    )
    probe(store)
    for writers in (WRITERS[:2], WRITERS[2:]):
        chain = Chain(store, meet(store, declared), signer=signer)
        roles = [("training", 0) if writer == WRITERS[2] else ("rollout", WRITERS.index(writer)) for writer in writers]
        records = [record for writer, role in zip(writers, roles) for record in _life(writer, *role)]
        for start in range(0, len(records), _PER_SEGMENT):
            chain.publish(chain.draft(records[start : start + _PER_SEGMENT]))
        checkpoints.make(store, RUN, signer)
    seals.seal(store, RUN, signer=signer)
    hold = holds.place(store, Run(store, RUN).info, "an incident", "somebody")
    holds.release(store, Run(store, RUN).info, hold.hold_id, "somebody else")
    return store


def kind_of(path: str) -> str:
    """The kind of object at `path`: the name of its folder, or its own."""
    if path.startswith(f"{layout.CANARY}/"):
        return layout.CANARY
    inside = path.removeprefix(f"{layout.run_root(RUN)}/")
    return inside.partition("/")[0]


def flip(store: MemoryStore, rng: random.Random, keys: tuple[str, ...] = ()) -> Flipped:
    """Flips one bit of one object, verifies, puts it back."""
    path = rng.choice(sorted(store.objects))
    data = store.objects[path]
    bit = rng.randrange(len(data) * 8)
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << (bit % 8)
    store.objects[path] = bytes(changed)
    try:
        return Flipped(path, bit, _missed(store, path, bit, keys))
    finally:
        store.objects[path] = data


def _missed(store: MemoryStore, path: str, bit: int, keys: tuple[str, ...]) -> str | None:
    result = verify(store, keys=keys)
    if result.verdict != "tampered":
        return f"the verdict is {result.verdict}"
    hits = [f for f in result.findings if f.severity == "error" and f.object == path]
    if not hits:
        named = sorted({f.object for f in result.findings if f.severity == "error"})
        return f"the findings name {', '.join(named)}"
    if kind_of(path) == "segment" and not any(
        f.byte is not None and f.end_byte is not None and f.byte <= bit // 8 < f.end_byte for f in hits
    ):
        return f"no finding holds byte {bit // 8}: {[(f.byte, f.end_byte) for f in hits]}"
    return None


def flips(count: int, seed: int, signer: Signer | None = None) -> Iterator[Flipped]:
    """`count` flips, one after the other, in one ledger made anew; it must be intact before and after."""
    store, rng = make_ledger(signer), random.Random(seed)
    keys = (signer.vkey(),) if signer is not None else ()
    before = verify(store, deep=True, keys=keys)
    if before.findings:
        raise AssertionError(f"the untouched ledger is not intact: {before.findings}")
    for _ in range(count):
        yield flip(store, rng, keys)
    if verify(store, deep=True, keys=keys).findings:
        raise AssertionError("the ledger was not put back as it was.")


def _run(title: str, count: int, seed: int, signer: Signer | None) -> int:
    flipped: Counter[str] = Counter()
    missed: list[Flipped] = []
    started = time.monotonic()
    for done, one in enumerate(flips(count, seed, signer), 1):
        flipped[kind_of(one.path)] += 1
        if one.missed is not None:
            missed.append(one)
            print(f"MISSED {one.path} bit {one.bit}: {one.missed}", flush=True)
        if sys.stderr.isatty() and done % 50 == 0:
            print(f"\r{title}: {done} of {count}", end="", file=sys.stderr, flush=True)
    seconds = time.monotonic() - started
    kinds = ", ".join(f"{kind} {number}" for kind, number in sorted(flipped.items()))
    print(f"{title}: {count - len(missed)} of {count} flipped bits found and located in {seconds:.0f} s ({kinds})")
    return len(missed)


def main() -> int:
    """Runs both ledgers; 1 when a flip was missed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("count", type=int, metavar="COUNT")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        signer = signing.new_key(Path(folder) / "key.pem")
        missed = _run("without keys", given.count, given.seed, None)
        missed += _run("signed", given.count, given.seed + 1, signer)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
