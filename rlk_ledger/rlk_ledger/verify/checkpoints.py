"""A run's checkpoints against each other, against the receipts as they were read, and against copies kept elsewhere."""

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from rlk_ledger import layout, signing
from rlk_ledger.checkpoints import departs
from rlk_ledger.store import Missing, Store
from rlk_ledger.verify.chains import Chains, Place
from rlk_ledger.verify.finding import Covered, Finding, finding
from rlk_ledger_schemas.checkpoints import Checkpoint, decode_checkpoint, origin
from rlk_ledger_schemas.errors import FormatError
from rlk_ledger_schemas.merkle import leaf as leaf_hash
from rlk_ledger_schemas.notes import LONGEST_NOTE, decode_base64, key_id
from rlk_ledger_schemas.objects import LedgerInfo

_READERS = 8


class Copy(NamedTuple):
    """A checkpoint kept elsewhere, and where."""

    where: str
    checkpoint: Checkpoint


class Coverage(NamedTuple):
    """What the checkpoints of a run cover.

    `newest` is the newest checkpoint that holds and, with keys or copies, that one of them vouches for; `registered`
    are the public keys that were given or that chains name whose beginning it covers; `believed` are the places after
    its marks whose receipts bear the signature of one of these.
    """

    newest: Checkpoint | None
    registered: frozenset[bytes]
    believed: frozenset[Place]
    findings: list[Finding]
    summary: Covered

    def covers(self, shipper: str, n: int) -> bool:
        """Whether a receipt is covered, or signed by a registered key."""
        marks = self.newest.info.marks if self.newest is not None else {}
        return n <= marks.get(shipper, -1) or (shipper, n) in self.believed


def check_checkpoints(
    store: Store,
    run_id: str,
    ledger: LedgerInfo | None,
    chains: Chains,
    copies: Sequence[Copy] = (),
    keys: Sequence[bytes] = (),
) -> Coverage:
    """Recomputes the tree over the receipts of `chains` in the order of integration; `keys` are public keys."""
    check = _Check(store, run_id, ledger, chains, keys)
    check.walk()
    for copy in copies:
        check.compare(copy)
    return check.coverage()


class _Check:
    """The checkpoints of one run under examination."""

    def __init__(
        self, store: Store, run_id: str, ledger: LedgerInfo | None, chains: Chains, keys: Sequence[bytes]
    ) -> None:
        self.store = store
        self.run_id = run_id
        self.ledger = ledger
        self.chains = chains
        self.keys = keys
        self.found: list[Finding] = []
        self.good: dict[int, Checkpoint] = {}  # those that decode and stand where they belong
        self.broken: set[int] = set()  # those whose tree or place among the others is wrong
        self.copied = False  # whether there are copies
        self.kept: set[int] = set()  # those of which a copy says the same
        self.marks: dict[str, int] = {}  # the furthest any good checkpoint or copy reaches
        self.last_k = -1
        self.last: dict[str, int] = {}  # the last receipt there is of each chain
        for shipper, n in chains.leaves:
            self.last[shipper] = max(n, self.last.get(shipper, -1))
        self.cut: set[str] = set()  # chains of which a covered receipt is gone
        self.unreadable = {f.object for f in chains.findings if f.kind == "receipt.unreadable"}

    def _path(self, k: int) -> str:
        return layout.checkpoint_path(self.run_id, k)

    def _say(self, kind: str, object_: str, text: str) -> None:
        self.found.append(finding(kind, object_, text))

    # -- the bucket's own --------------------------------------------------------------------------------------------

    def walk(self) -> None:
        """Every checkpoint of the bucket, from 0 on."""
        before: Checkpoint | None = None
        for k, checkpoint in self._read():
            if checkpoint is not None:
                self.good[k] = checkpoint
                follows = k == 0 or before is not None  # else what it follows is damaged, which was said
                wrong = departs(checkpoint, before) if follows else None
                if wrong is not None:
                    unlinked = checkpoint.info.previous != (before.digest if before is not None else None)
                    self._say("checkpoint.unlinked" if unlinked else "checkpoint.contradicts", self._path(k), wrong)
                    self.broken.add(k)
                self._check_signature(checkpoint)
                self._check_leaves(checkpoint, self._path(k))
            before = checkpoint
        self._check_tails(f"checkpoint {max(self.good)}" if self.good else "")

    def _read(self) -> Iterator[tuple[int, Checkpoint | None]]:
        """(k, checkpoint) from 0 to the newest; None where it is gone or damaged."""
        sizes = {}
        for name, size in self.chains.listing:
            k = layout.parse_checkpoint(name)
            if k is not None:
                sizes[k] = size
            elif name.startswith("checkpoint/"):
                self._say("object.unknown", f"{layout.run_root(self.run_id)}/{name}", "it is no checkpoint")
        numbers = sorted(sizes)
        self.last_k = numbers[-1] if numbers else -1
        before = -1
        with ThreadPoolExecutor(_READERS) as pool:
            for k, data in zip(numbers, pool.map(lambda k: self._bytes(k, sizes[k]), numbers), strict=True):
                if k > before + 1:
                    which = (
                        f"checkpoint {before + 1} is" if k == before + 2 else f"checkpoints {before + 1}-{k - 1} are"
                    )
                    self._say("checkpoint.missing", self._path(before + 1), f"{which} gone, and {k} is there")
                    yield k - 1, None
                yield k, self._decoded(k, data)
                before = k

    def _bytes(self, k: int, size: int) -> bytes:
        """The bytes of a checkpoint; of one that is too long to be a note no more than that is of interest."""
        return self.store.read(self._path(k)) if size <= LONGEST_NOTE else bytes(LONGEST_NOTE + 1)

    def _decoded(self, k: int, data: bytes) -> Checkpoint | None:
        path = self._path(k)
        try:
            found = decode_checkpoint(data, path)
        except FormatError as error:
            self._say("checkpoint.unreadable", path, str(error).removeprefix(f"{path}: "))
            return None
        here = self.ledger.ledger_id if self.ledger is not None else found.info.ledger_id
        if (found.origin, found.k) != (origin(here, self.run_id), k):
            self._say("checkpoint.misplaced", path, f"it is checkpoint {found.k} of {found.origin}")
            return None
        return found

    def _check_signature(self, checkpoint: Checkpoint) -> None:
        """A checkpoint that names a key bears that key's signature; lines of other keys say nothing to us."""
        if checkpoint.info.public_key is None:
            return
        if not signing.available():
            text = f"it is signed, and that was not checked: {signing.INSTALL}"
            self._say("signature.unchecked", self._path(checkpoint.k), text)
        elif not _signed_by(checkpoint, decode_base64(checkpoint.info.public_key)):
            self._say("signature.invalid", self._path(checkpoint.k), "it bears no signature of the key it names")
            self.broken.add(checkpoint.k)

    # -- against the receipts ----------------------------------------------------------------------------------------

    def _check_leaves(self, checkpoint: Checkpoint, who: str) -> None:
        """Every receipt a checkpoint appends, as it was read, against the leaf the checkpoint has of it."""
        for shipper, n, leaf in checkpoint.receipts():
            there = self._leaf(shipper, n)
            path = layout.receipt_path(self.run_id, shipper, n)
            if there is not None and there != leaf and path not in self.unreadable:
                self._say("receipt.replaced", path, f"it is not the receipt {who} covers")
        for shipper, mark in checkpoint.info.marks.items():
            self.marks[shipper] = max(mark, self.marks.get(shipper, -1))

    def _leaf(self, shipper: str, n: int) -> bytes | None:
        """The leaf of a receipt as it was read; one that came after the listing is read now."""
        place = (shipper, n)
        if place not in self.chains.leaves and shipper not in self.cut:
            try:
                data = self.store.read(layout.receipt_path(self.run_id, shipper, n))
            except Missing:
                self.cut.add(shipper)
            else:
                self.chains.leaves[place] = leaf_hash(data)
                self.last[shipper] = max(n, self.last.get(shipper, -1))
        return self.chains.leaves.get(place)

    def _check_tails(self, who: str) -> None:
        """Receipts up to the marks that are gone from the end of a chain; a hole in it is found without marks."""
        for shipper, mark in sorted(self.marks.items()):
            last = self.last.get(shipper, -1)
            if last < mark:
                one = mark == last + 1
                which = f"receipt {mark} is" if one else f"receipts {last + 1}-{mark} are"
                path = layout.receipt_path(self.run_id, shipper, last + 1)
                self._say(
                    "receipt.missing",
                    path,
                    f"{which} gone from the end of the chain; {who} covers {'it' if one else 'them'}",
                )
                self.last[shipper] = mark  # said

    # -- against copies ----------------------------------------------------------------------------------------------

    def compare(self, copy: Copy) -> None:
        """A copy kept elsewhere: the bucket must have that very checkpoint, or show what became of it."""
        mine, k = copy.checkpoint, copy.checkpoint.k
        self.copied = True
        if self.ledger is not None and mine.info.ledger_id != self.ledger.ledger_id:
            text = f"{copy.where} is of ledger {mine.info.ledger_id}; this one says it is {self.ledger.ledger_id}"
            self._say("ledger.changed", layout.LEDGER, text)
            return
        there = self.good.get(k)
        if there is not None and there.text == mine.text:
            self.kept.add(k)
            return
        if there is not None:
            text = f"{copy.where} knows another checkpoint {k}: {mine.size} receipts, {mine.info.wall_us} us"
            self._say("checkpoint.changed", self._path(k), text)
        elif k > self.last_k:
            newest = f"the newest here is {self.last_k}" if self.last_k >= 0 else "here is none"
            text = f"{copy.where} is checkpoint {k}, which covers {mine.size} receipts; {newest}"
            self._say("checkpoint.missing", self._path(k), text)
        before = self.good.get(k - 1)
        if before is not None and mine.info.previous != before.digest:
            text = f"{copy.where} follows another checkpoint {k - 1}: {mine.info.previous}"
            self._say("checkpoint.changed", self._path(k - 1), text)
        self._check_leaves(mine, copy.where)
        self._check_tails(copy.where)

    # -- the sum -----------------------------------------------------------------------------------------------------

    def coverage(self) -> Coverage:
        """What is covered by what holds, and the findings."""
        newest = self._newest()
        marks = newest.info.marks if newest is not None else {}
        registered = registered_by(marks, self.chains) | frozenset(self.keys)
        beyond = {place for place in self.chains.leaves if place[1] > marks.get(place[0], -1)}
        believed = frozenset(p for p in beyond if p in self.chains.signed and self.chains.keys[p[0]] in registered)
        self._say_uncovered(newest, beyond - believed)
        summary = Covered(
            run_id=self.run_id,
            k=newest.k if newest is not None else None,
            digest=newest.digest if newest is not None else None,
            receipts=len(self.chains.leaves) - len(beyond),
            signed=len(believed),
            uncovered=len(beyond) - len(believed),
        )
        return Coverage(newest, registered, believed, self.found, summary)

    def _newest(self) -> Checkpoint | None:
        """The newest checkpoint that holds and that is believed.

        With keys or copies at hand those decide: others of the bucket are whoever's may write to it.
        """
        holds = [c for k, c in sorted(self.good.items()) if k not in self.broken]
        if not self.keys:
            self._say_other_keys(holds)
        if not self.keys and not self.copied:
            return holds[-1] if holds else None
        kept = [c for c in holds if c.k in self.kept]
        return max([*kept, *self._signed(holds)], key=lambda c: c.k, default=None)

    def _say_other_keys(self, holds: Sequence[Checkpoint]) -> None:
        """Names the checkpoints after the first signed one that do not bear its key: nobody says here whose that is."""
        first = next((c for c in holds if c.info.public_key is not None), None)
        if first is None:
            return
        after = [c for c in holds if c.k > first.k]
        others = [c.k for c in after if c.info.public_key != first.info.public_key]
        if others:
            text = f"checkpoint {first.k} is signed; {len(others)} of {len(after)} after it bear another key or none, "
            self._say("key.changed", self._path(others[0]), f"{text}this one first; `--key` says whose count")

    def _signed(self, holds: Sequence[Checkpoint]) -> list[Checkpoint]:
        """Those of `holds` that a given key signed."""
        if not self.keys or not signing.available():
            return []
        signed = [c for c in holds if any(_signed_by(c, key) for key in self.keys)]
        others = sorted({c.info.public_key for c in holds if c.info.public_key} - {*map(signing.text_of, self.keys)})
        if others:
            text = f"checkpoints of this run are signed by {len(others)} other key{'s' * (len(others) > 1)}: "
            text += ", ".join(others[:3])
            self._say("key.unknown", f"{layout.run_root(self.run_id)}/checkpoint", text)
        if not signed:
            text = f"none of {len(holds)} checkpoint{'s' * (len(holds) != 1)} is signed by a key that was given"
            self._say("checkpoint.unsigned", f"{layout.run_root(self.run_id)}/checkpoint", text)
        return signed

    def _say_uncovered(self, newest: Checkpoint | None, places: set[Place]) -> None:
        """Names what came after the newest checkpoint; a run that never had one says so in the summary."""
        if not places or (newest is None and not self.keys and not self.copied and self.last_k < 0):
            return
        chains = dict(sorted(places, reverse=True))  # the first uncovered n of each
        count, some = len(places), ", ".join(f"{s} from {n}" for s, n in sorted(chains.items())[:3])
        of = f"{count} of {len(self.chains.leaves)} receipts, in {len(chains)} chain{'s' * (len(chains) > 1)} ({some}"
        of += ", ...)" if len(chains) > 3 else ")"
        after = f"came after checkpoint {newest.k}" if newest is not None else "are covered by no checkpoint"
        if self.copied or self.keys:
            what = "signed by a given key" if self.keys else "of which a copy was given"
            what = "of which a copy was given or that a given key signed" if self.keys and self.copied else what
            after = f"came after checkpoint {newest.k}, the newest {what}," if newest is not None else f"{after} {what}"
        how = f"`rlk-ledger checkpoint {self.run_id}{' -o FILE' * self.copied}` covers them"
        text = f"{of}, {after} and bear no registered signature; {how}"
        self._say("receipt.uncovered", layout.run_root(self.run_id), text)


def registered_by(marks: Mapping[str, int], chains: Chains) -> frozenset[bytes]:
    """The public keys that the first receipts name which are covered up to `marks`, the last n by shipper."""
    return frozenset(key for shipper, key in chains.keys.items() if marks.get(shipper, -1) >= 0)


def _signed_by(checkpoint: Checkpoint, public_key: bytes) -> bool:
    """Whether a signature line of `public_key` under the checkpoint's origin holds."""
    wanted = key_id(checkpoint.origin, public_key)
    return any(
        (line.name, line.key_id) == (checkpoint.origin, wanted)
        and signing.check(public_key, line.signature, checkpoint.text)
        for line in checkpoint.signatures
    )
