"""Making checkpoints: races, crashes, listings that are behind, holes, damage."""

import contextlib
import itertools
import random
import shutil
import threading
from pathlib import Path

import pytest
from many_chains import RUN, Many, Stale, checked

from rlk_ledger import checkpoints, index, layout, news
from rlk_ledger.build import event
from rlk_ledger.chain import Chain
from rlk_ledger.store import FileStore, open_store
from rlk_ledger.verify import verify
from rlk_ledger_schemas.checkpoints import decode_checkpoint
from rlk_ledger_schemas.errors import LedgerError, StoreError
from rlk_ledger_schemas.findings import Exit
from rlk_ledger_schemas.notes import LONGEST_NOTE


@pytest.fixture
def many(tmp_path: Path) -> Many:
    return Many(str(tmp_path / "ledger"))


def everything(store) -> dict[str, int]:
    """The last n of every chain there is."""
    keys = [layout.parse_receipt(e.path.removeprefix(f"runs/{RUN}/")) for e in store.list(f"runs/{RUN}/receipt")]
    return {shipper: max(n for s, n in keys if s == shipper) for shipper, _ in keys}


def test_each_checkpoint_appends_what_is_new_sorted_and_links_to_the_one_before(many: Many) -> None:
    a, b = many.chain(), many.chain()
    many.grow(a, 3)
    many.grow(b, 2)
    first = checkpoints.make(many.store, RUN)
    assert first.info.appended == tuple(sorted([(a.shipper, 0, 2), (b.shipper, 0, 1)]))
    assert checkpoints.make(many.store, RUN) is None, "nothing is new"
    many.grow(b)
    many.grow(many.chain())
    second = checkpoints.make(many.store, RUN, known=first)
    assert (second.k, second.size, second.info.previous) == (1, 7, first.digest)
    assert {s: (f, n) for s, f, n in second.info.appended} == {b.shipper: (2, 2), many.chains[2].shipper: (0, 0)}
    assert [c.k for c in checked(many.store)] == [0, 1]
    assert second.info.marks == everything(many.store)


def test_a_run_without_receipts_has_no_checkpoint(many: Many) -> None:
    assert checkpoints.make(many.store, RUN) is None
    assert checkpoints.latest(many.store, RUN) is None
    assert checkpoints.read_checkpoints(many.store, RUN) == []


def test_many_makers_at_once_make_one_tree_and_every_receipt_is_in_it_once(many: Many) -> None:
    for _ in range(4):
        many.chain()
    failures: list[BaseException] = []

    def ship(chain: Chain) -> None:
        many.grow(chain, 12)

    def maker() -> None:
        try:
            for _ in range(15):
                checkpoints.make(open_store(many.store.url), RUN)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=ship, args=(c,)) for c in many.chains]
    threads += [threading.Thread(target=maker) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    checkpoints.make(many.store, RUN)
    found = checked(many.store)
    assert found[-1].info.marks == everything(many.store)
    assert found[-1].size == 48


class Slow(FileStore):
    """A maker whose `create` of a checkpoint is preceded by somebody else's."""

    def __init__(self, root: Path, others: list) -> None:
        super().__init__(root)
        self.others = others

    def create(self, path: str, data: bytes) -> None:
        if "/checkpoint/" in path and self.others:
            self.others.pop(0)()
        super().create(path, data)


def test_the_loser_of_a_race_goes_on_from_the_winner_and_covers_the_rest(many: Many, tmp_path: Path) -> None:
    a, b = many.chain(), many.chain()
    many.grow(a, 2)

    def other() -> None:  # sees less than the loser, which had looked before
        many.grow(b, 2)
        checkpoints.make(many.store, RUN)
        many.grow(a)

    made = checkpoints.make(Slow(tmp_path / "ledger", [other]), RUN)
    assert made is None, "the winner had covered all that the loser saw"
    many.grow(b)

    def another() -> None:
        assert checkpoints.make(many.store, RUN).size == 7

    many.grow(b)
    late = Slow(tmp_path / "ledger", [another])
    late.list = lambda prefix: FileStore.list(late, prefix)  # type: ignore[method-assign]
    assert checkpoints.make(late, RUN) is None
    assert checked(many.store)[-1].info.marks == everything(many.store)


def test_a_maker_that_never_wins_gives_up_and_says_so(many: Many, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(checkpoints, "_COLLISIONS", 4)
    mine, theirs = many.chain(), many.chain()
    many.grow(mine)

    def somebody() -> None:  # always first, and always blind to my chain
        many.grow(theirs)
        blind = Stale(tmp_path / "ledger", {mine.shipper})
        assert checkpoints.make(blind, RUN) is not None

    with pytest.raises(StoreError, match="in a row were others'; try again"):
        checkpoints.make(Slow(tmp_path / "ledger", [somebody] * 100), RUN)
    assert checkpoints.make(many.store, RUN).info.marks == everything(many.store)
    checked(many.store)


def test_what_a_stale_listing_misses_is_integrated_by_a_later_maker(many: Many, tmp_path: Path) -> None:
    a, b = many.chain(), many.chain()
    many.grow(a, 2)
    many.grow(b, 2)
    first = checkpoints.make(Stale(tmp_path / "ledger", {b.shipper}), RUN)
    assert first.info.marks == {a.shipper: 1}
    many.grow(a)
    newest = f"{a.n - 1:08d}.json"
    second = checkpoints.make(Stale(tmp_path / "ledger", {newest}), RUN)
    assert second.info.marks == {a.shipper: 1, b.shipper: 1}, "the chain without news in the listing is not asked"
    assert checkpoints.make(many.store, RUN).info.marks == everything(many.store)
    checked(many.store)


def test_a_checkpoint_the_listing_misses_is_found_by_name(many: Many, tmp_path: Path) -> None:
    a = many.chain()
    for _ in range(4):
        many.grow(a)
        checkpoints.make(many.store, RUN)
    stale = Stale(tmp_path / "ledger", {"00000002", "00000003"})
    assert checkpoints.latest(stale, RUN).k == 3
    assert checkpoints.latest(Stale(tmp_path / "ledger", {"0000000"}), RUN).k == 3
    many.grow(a)
    assert checkpoints.make(Stale(tmp_path / "ledger", {"/checkpoint/"}), RUN).k == 4


def test_nothing_after_a_hole_in_a_chain_is_integrated_before_the_hole_is_filled(many: Many, tmp_path: Path) -> None:
    a = many.chain()
    many.grow(a, 4)
    gone = tmp_path / "ledger" / layout.receipt_path(RUN, a.shipper, 2)
    data = gone.read_bytes()
    gone.unlink()
    assert checkpoints.make(many.store, RUN).info.marks == {a.shipper: 1}
    assert checkpoints.make(many.store, RUN) is None
    gone.write_bytes(data)
    assert checkpoints.make(many.store, RUN).info.marks == {a.shipper: 3}
    checked(many.store)


@pytest.mark.parametrize("harm", ["flipped", "cut", "another's", "unlinked", "empty"])
def test_a_damaged_receipt_is_never_integrated_and_the_intact_ones_are(many: Many, tmp_path: Path, harm: str) -> None:
    a, b = many.chain(), many.chain()
    many.grow(a, 3)
    many.grow(b, 2)
    path = tmp_path / "ledger" / layout.receipt_path(RUN, a.shipper, 1)
    other = tmp_path / "ledger" / layout.receipt_path(RUN, b.shipper, 1)
    whole = path.read_bytes()
    twin = Chain(many.store, many.contact, a.shipper)
    twin.n, twin.previous = 1, "sha256:" + "0" * 64
    forged = twin.draft(
        [event(RUN, a.shipper, 9, "weights.published", weight_version="v", digest="a:0", tensor_count=1)]
    )
    damaged = {
        "flipped": whole.replace(b'"rows":1', b'"rows":2'),
        "cut": whole[:-9],
        "another's": other.read_bytes(),
        "unlinked": forged.receipt_bytes,
        "empty": b"",
    }
    path.write_bytes(damaged[harm])
    for known in (None, checkpoints.latest(many.store, RUN)):
        with pytest.raises(LedgerError, match=rf"{a.shipper}/00000001.json.*rlk-ledger verify {RUN}"):
            checkpoints.make(many.store, RUN, known=known)
    assert checked(many.store)[-1].info.marks == {a.shipper: 0, b.shipper: 1}
    path.write_bytes(whole)
    assert checkpoints.make(many.store, RUN).info.marks == everything(many.store)


def test_a_reply_that_was_cut_is_read_again_and_is_no_damage(many: Many, tmp_path: Path) -> None:
    cut: set[str] = set()

    class Cut(FileStore):
        def read(self, path: str) -> bytes:
            data = super().read(path)
            if path in cut or path.endswith("ledger.json"):
                return data
            cut.add(path)
            return data[: len(data) // 2]

    a = many.chain()
    many.grow(a, 3)
    made = checkpoints.make(Cut(tmp_path / "ledger"), RUN)
    assert made.info.marks == {a.shipper: 2}
    checked(many.store)


def test_more_receipts_than_a_checkpoint_takes_make_several(many: Many, monkeypatch) -> None:
    monkeypatch.setattr(checkpoints, "MOST_RECEIPTS", 8)
    monkeypatch.setattr(news, "_LISTED", 1)  # chains are followed by name once there are more receipts than chains
    for count in (20, 3, 1, 9):
        many.grow(many.chain(), count)
    last = checkpoints.make(many.store, RUN)
    found = checked(many.store)
    assert max(len(c.leaves) for c in found) == 8
    assert len(found) <= 7
    assert last.info.marks == everything(many.store)
    many.grow(many.chains[0], 2)
    many.grow(many.chain(), 1)
    assert checkpoints.make(many.store, RUN).size == 36
    checked(many.store)


def test_no_note_outgrows_its_limit_however_many_chains_there_are() -> None:
    shippers = [f"{i:032x}" for i in range(30_000)]
    chains = [[news.Arrival(s, n, b"x" * 32) for n in range(2)] for s in shippers]
    marks: dict[str, int] = {}
    composer = checkpoints._Composer("1f" * 16, "r" * 128, None, lambda: 2**50)
    before, sizes = None, []
    for most in (8_192, 13_500):
        data = checkpoints._compose(composer, before, checkpoints._next_batch(chains[:most], marks, RUN))
        before = decode_checkpoint(data, "x")
        marks = before.info.marks
        sizes.append(len(data))
    assert 0.7 * LONGEST_NOTE < max(sizes) <= LONGEST_NOTE
    with pytest.raises(LedgerError, match="more than a checkpoint can name"):
        checkpoints._next_batch(chains, dict.fromkeys(shippers[:20_000], 5), RUN)


@pytest.fixture
def begun(many: Many, tmp_path: Path):
    """Makes copies of a ledger with one checkpoint and news in an old and in a new chain."""
    a, b = many.chain(), many.chain()
    many.grow(a)
    checkpoints.make(many.store, RUN)
    many.grow(a)
    many.grow(b)
    numbers = itertools.count()

    def copy():
        path = tmp_path / f"copy{next(numbers)}"
        shutil.copytree(tmp_path / "ledger", path)
        return open_store(str(path))

    return copy


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_maker_killed_at_any_call_leaves_what_the_next_one_goes_on_from(helpers, begun, when: str) -> None:
    for at in range(200):
        store = begun()
        faulty = helpers.FaultyStore(store, at, when, lambda: helpers.Killed("here"))
        with contextlib.suppress(helpers.Killed):
            checkpoints.make(faulty, RUN)
        assert verify(store, RUN).exit_code == Exit.OK, "a crash looks like a crash"
        checkpoints.make(store, RUN)
        assert checked(store)[-1].info.marks == everything(store)
        if len(faulty.calls) <= at:
            break
    assert at > 8, "it was killed at every call"


@pytest.mark.parametrize("when", ["before", "after"])
def test_failed_calls_and_lost_replies_never_make_two_trees(helpers, begun, when: str) -> None:
    for at in range(200):
        store = begun()
        faulty = helpers.FaultyStore(store, at, when, helpers.lost_reply)
        try:
            checkpoints.make(faulty, RUN)
        except StoreError:
            checkpoints.make(faulty, RUN)
        assert checked(store)[-1].info.marks == everything(store)
        if len(faulty.calls) <= at:
            break
    assert at > 8


def test_a_store_that_overwrites_is_noticed_when_the_checkpoint_is_read_back(many: Many, tmp_path: Path) -> None:
    class Careless(FileStore):
        def create(self, path: str, data: bytes) -> None:
            if "/checkpoint/" in path and rival:
                target = self.root / path
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(rival.pop())
                return
            super().create(path, data)

    a, b = many.chain(), many.chain()
    many.grow(a)
    ledger_id = many.contact.ledger.ledger_id
    composer = checkpoints._Composer(ledger_id, RUN, None, lambda: 1)
    seen = news.News(many.store, RUN, ledger_id).follow([a.shipper], {}, 9)
    rival = [checkpoints._compose(composer, None, seen)]
    many.grow(b)
    made = checkpoints.make(Careless(tmp_path / "ledger"), RUN)
    assert made.k == 1
    assert checked(many.store)[-1].info.marks == everything(many.store)


def test_an_index_that_fails_fails_no_checkpoint(many: Many, monkeypatch, caplog) -> None:
    def broken(*_: object) -> None:
        raise OSError("no space")

    monkeypatch.setattr(index, "write", broken)
    many.grow(many.chain())
    assert checkpoints.make(many.store, RUN).k == 0
    assert "no index: no space" in caplog.text


def test_readers_refuse_a_damaged_or_missing_checkpoint_and_point_to_verify(many: Many, tmp_path: Path) -> None:
    a = many.chain()
    for _ in range(3):
        many.grow(a)
        checkpoints.make(many.store, RUN)
    folder = tmp_path / "ledger" / "runs" / RUN / "checkpoint"
    whole = (folder / "00000001").read_bytes()
    for data in (whole[:-3], (folder / "00000000").read_bytes(), b""):
        (folder / "00000001").write_bytes(data)
        with pytest.raises(LedgerError, match=rf"checkpoint/00000001.*rlk-ledger verify {RUN}"):
            checkpoints.read_checkpoints(many.store, RUN)
    (folder / "00000001").unlink()
    with pytest.raises(LedgerError, match="00000001 is gone"):
        checkpoints.read_checkpoints(many.store, RUN)
    (folder / "00000001").write_bytes(whole)
    assert len(checked(many.store)) == 3


def test_a_checkpoint_of_another_ledger_is_not_gone_on_from(many: Many, tmp_path: Path) -> None:
    other = Many(str(tmp_path / "other"))
    other.grow(other.chain())
    checkpoints.make(other.store, RUN)
    a = many.chain()
    many.grow(a)
    source = tmp_path / "other" / "runs" / RUN / "checkpoint" / "00000000"
    target = tmp_path / "ledger" / "runs" / RUN / "checkpoint" / "00000000"
    target.parent.mkdir(parents=True)
    target.write_bytes(source.read_bytes())
    with pytest.raises(LedgerError, match="not of 'rlk-ledger/"):
        checkpoints.make(many.store, RUN)


@pytest.mark.parametrize("seed", range(6))
def test_any_order_of_growth_making_and_blindness_is_one_log(tmp_path: Path, seed: int) -> None:
    """A state machine by hand: chains grow and begin, makers see little or all, and the log holds at every step."""
    draw = random.Random(seed)
    many = Many(str(tmp_path / "ledger"))
    known = None
    for _ in range(40):
        act = draw.random()
        if act < 0.15 or not many.chains:
            many.chain()
        elif act < 0.6:
            many.grow(draw.choice(many.chains), draw.randrange(1, 4))
        else:
            hidden = {c.shipper for c in many.chains if draw.random() < 0.3}
            store = Stale(tmp_path / "ledger", hidden) if draw.random() < 0.5 else many.store
            known = checkpoints.make(store, RUN, known=draw.choice([None, known])) or known
            checked(many.store)
    checkpoints.make(many.store, RUN)
    assert checked(many.store)[-1].info.marks == everything(many.store) or not everything(many.store)
    assert verify(many.store, RUN).exit_code == Exit.OK
