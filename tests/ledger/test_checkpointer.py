"""When a shipper makes checkpoints, and what it costs the bucket."""

import random
from pathlib import Path

import pytest
from many_chains import RUN, Many, Stale, checked

from rlk_ledger import checkpointing, checkpoints, layout
from rlk_ledger.checkpointing import Checkpointer
from rlk_ledger.store import FileStore


@pytest.fixture
def many(tmp_path: Path) -> Many:
    return Many(str(tmp_path / "ledger"))


class Clock:
    def __init__(self) -> None:
        self.now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


def covering(many: Many, period: float, clock: Clock) -> Checkpointer:
    return Checkpointer(RUN, period, wall_s=clock, mono_s=clock)


class Counting(FileStore):
    """Notes every call."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.calls: list[str] = []

    def create(self, path: str, data: bytes) -> None:
        self.calls.append(f"create {path}")
        super().create(path, data)

    def read(self, path: str) -> bytes:
        self.calls.append(f"read {path}")
        return super().read(path)

    def list(self, prefix: str):
        self.calls.append(f"list {prefix}")
        return super().list(prefix)

    def children(self, prefix: str) -> tuple[str, ...]:
        self.calls.append(f"children {prefix}")
        return super().children(prefix)

    def stat(self, path: str) -> int | None:
        self.calls.append(f"stat {path}")
        return super().stat(path)


def test_nothing_is_asked_of_the_bucket_while_there_is_no_news_or_it_is_not_time(many: Many) -> None:
    clock = Clock()
    mine = covering(many, 300, clock)
    clock.now += 10_000
    assert not mine.due(False), "no news"
    a = many.chain()
    many.grow(a)
    mine.note(a.shipper, 0, {"w": 4})
    assert mine.due(False)
    assert mine.round(many.store, now=False)
    assert mine.covered_up_to("w") == 4
    assert not mine.due(True), "all is covered"
    many.grow(a)
    mine.note(a.shipper, 1, {"w": 9})
    assert not mine.due(False), "the next is not due yet"
    assert mine.due(True), "but a writer may ask"
    clock.now += 376
    assert mine.due(False)
    assert not covering(many, 0, clock).due(False)


def test_a_young_checkpoint_is_left_to_age_unless_a_writer_waits(many: Many, tmp_path: Path, monkeypatch) -> None:
    clock = Clock()
    monkeypatch.setattr(checkpointing, "make", lambda *a: checkpoints.make(*a, wall_us=lambda: int(clock.now * 1e6)))
    mine, theirs = covering(many, 300, clock), covering(many, 300, clock)
    a, b = many.chain(), many.chain()
    many.grow(a)
    many.grow(b)
    mine.note(a.shipper, 0, {"a": 1})
    theirs.note(b.shipper, 0, {"b": 1})
    assert mine.round(many.store, now=False)
    assert theirs.round(many.store, now=False), "one checkpoint covers both"
    many.grow(b)
    theirs.note(b.shipper, 1, {"b": 2})
    clock.now += 100
    counting = Counting(tmp_path / "ledger")
    assert not theirs.round(counting, now=False)
    assert counting.calls == [f"stat runs/{RUN}/checkpoint/00000001"], "looking costs one request"
    assert theirs.covered_up_to("b") == 1
    assert theirs.round(many.store, now=True)
    assert theirs.covered_up_to("b") == 2
    many.grow(b)
    theirs.note(b.shipper, 2, {"b": 3})
    clock.now -= 1_000_000  # a clock that went back makes it look as if it came from the future
    assert theirs.round(many.store, now=False)
    assert [c.k for c in checked(many.store)] == [0, 1, 2]


def test_many_shippers_make_about_one_checkpoint_a_period_between_them(many: Many, tmp_path: Path, monkeypatch) -> None:
    clock = Clock()
    monkeypatch.setattr(checkpointing, "make", lambda *a: checkpoints.make(*a, wall_us=lambda: int(clock.now * 1e6)))
    monkeypatch.setattr(checkpointing.random, "uniform", random.Random(1).uniform)
    shippers = [(many.chain(), covering(many, 300, clock)) for _ in range(24)]
    for minute in range(30):
        clock.now += 60
        if minute % 10 == 0:
            for chain, mine in shippers:
                many.grow(chain)
                mine.note(chain.shipper, chain.n - 1, {chain.shipper: chain.n - 1})
        for _, mine in shippers:
            if mine.due(False):
                mine.round(many.store, now=False)
    made = checked(many.store)
    assert 3 <= len(made) <= 8, "half an hour has six periods, and there was news in three"
    assert made[-1].size == 72


def test_a_checkpoint_that_cannot_be_made_is_said_and_tried_again_later(many: Many, tmp_path: Path) -> None:
    clock = Clock()
    mine = covering(many, 300, clock)
    a, b = many.chain(), many.chain()
    many.grow(a, 2)
    many.grow(b)
    mine.note(a.shipper, 1, {"a": 5})
    path = tmp_path / "ledger" / layout.receipt_path(RUN, b.shipper, 0)
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    mine.round(many.store, now=True)
    assert "rlk-ledger verify" in mine.error
    assert mine.covered_up_to("a") == 5, "what is intact is covered all the same"
    mine.note(b.shipper, 0, {"b": 0})
    assert not mine.due(True), "not at once again"
    clock.now += 3
    assert mine.due(True)
    assert not mine.round(many.store, now=True)
    path.write_bytes(whole)
    clock.now += 3
    assert mine.round(many.store, now=True)
    assert mine.error is None


@pytest.mark.parametrize("damage", ["gone", "cut"])
def test_what_cannot_be_covered_is_asked_for_ever_less_often_while_a_writer_waits(many: Many, tmp_path, damage) -> None:
    clock = Clock()
    mine = covering(many, 300, clock)
    a = many.chain()
    many.grow(a)
    path = tmp_path / "ledger" / layout.receipt_path(RUN, a.shipper, 0)
    whole = path.read_bytes()
    path.unlink() if damage == "gone" else path.write_bytes(whole[:-1])
    mine.note(a.shipper, 0, {"w": 4})
    rounds, end = 0, clock.now + 3600
    while clock.now < end:
        if mine.due(True):
            rounds += 1
            assert not mine.round(many.store, now=True)
        clock.now += 0.5
    assert 20 <= rounds <= 80, "an hour at one a minute or two, and a few quick ones to begin with"
    path.write_bytes(whole)
    clock.now += 121
    assert mine.due(True)
    assert mine.round(many.store, now=True)
    many.grow(a)
    mine.note(a.shipper, 1, {"w": 9})
    assert mine.due(True), "the next one is not late for it"


def test_a_writer_is_told_it_is_covered_only_when_the_marks_say_so(many: Many, tmp_path: Path) -> None:
    clock = Clock()
    mine = covering(many, 300, clock)
    a, b = many.chain(), many.chain()
    many.grow(a)
    many.grow(b)
    mine.note(a.shipper, 0, {"a": 7})
    blind = Stale(tmp_path / "ledger", {a.shipper})
    assert not mine.round(blind, now=True)
    assert checkpoints.latest(many.store, RUN).info.marks == {b.shipper: 0}
    assert mine.covered_up_to("a") == -1
    assert mine.round(many.store, now=True)
    assert mine.covered_up_to("a") == 7
