"""Indexes and the tail say what the receipts say, whatever happened to the indexes; an index that lies is found."""

import hashlib
import json
import random
import shutil
import threading
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlk_ledger import checkpoints, index, layout
from rlk_ledger.build import build, event
from rlk_ledger.chain import held_ranges
from rlk_ledger.ledger import Run, open_ledger
from rlk_ledger.outbox import Outbox
from rlk_ledger.receipts import SAMPLE_TYPES, Receipts, to_table
from rlk_ledger.shipper import Shipper
from rlk_ledger.spans import merged
from rlk_ledger.store import Entry, FileStore, open_store
from rlk_ledger.verify import verify
from rlk_ledger_schemas.codec import decode_envelope
from rlk_ledger_schemas.errors import LedgerError
from rlk_ledger_schemas.objects import Receipt, SegmentRef, TypeCount, WriterRange, encode_receipt
from rlk_ledger_schemas.samples import encode_samples

RUN = "r1"
LOADED = {"weight_version": "v", "digest": "sha256:00", "tensor_count": 1, "engine": "e"}
LEDGER = "0f" * 16
TYPES = ["logprobs", "rollout.sample", "gap", "weights.loaded"]
SAMPLES = ["a", "b", "c", "é"]
_step = st.none() | st.integers(0, 40)


@st.composite
def _writer(draw: st.DrawFn) -> WriterRange:
    spans = merged(
        (first, first + length)
        for first, length in draw(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 9)), max_size=3))
    )
    return WriterRange(
        writer_id=draw(st.sampled_from(["aa" * 16, "bb" * 16, "cc" * 16])),
        first=spans[0][0] if spans else 0,
        last=spans[-1][1] if spans else 0,
        ranges=None if len(spans) == 1 else tuple(spans),
        gaps=draw(st.none() | st.integers(0, 5)),
        lost_bytes=draw(st.none() | st.integers(0, 5)),
        closed=draw(st.none() | st.just(True)),
        dead=draw(st.none() | st.just(True)),
    )


@st.composite
def _receipt(draw: st.DrawFn) -> Receipt:
    root = hashlib.sha256(draw(st.binary(max_size=4))).digest()
    kinds = draw(st.lists(st.sampled_from(TYPES), unique=True, max_size=3))
    types = []
    for kind in kinds:
        low, high = sorted([draw(_step), draw(_step)], key=lambda s: -1 if s is None else s)
        low = high if low is None else low
        types.append(TypeCount(type=kind, count=draw(st.integers(0, 9)), min_step=low, max_step=high))
    ids = draw(st.none() | st.sets(st.sampled_from(SAMPLES)))
    return Receipt(
        format=1,
        ledger_id=LEDGER,
        run_id=RUN,
        shipper=draw(st.sampled_from(["01" * 16, "02" * 16, "ff" * 16])),
        n=0,
        segment=SegmentRef(name="", bytes=draw(st.integers(0, 9)), rows=3, sha256="sha256:" + "ab" * 32),
        writers=tuple(draw(st.lists(_writer(), max_size=3))),
        root=f"sha256:{root.hex()}",
        types=tuple(types),
        wall_us=draw(st.integers(0, 2**53)),
        samples=None if ids is None else encode_samples(ids),
        ledger_json=draw(st.none() | st.just("sha256:" + "cd" * 32)),
        public_key=draw(st.none() | st.just("AAAA")),
        self_="sha256:" + "ef" * 32,
    )


def _numbered(receipts: list[Receipt]) -> list[Receipt]:
    """The receipts in chains: each numbered within its shipper, its segment named as the format names it."""
    last: dict[str, int] = {}
    out = []
    for receipt in receipts:
        n = last[receipt.shipper] = last.get(receipt.shipper, -1) + 1
        name = layout.segment_name(receipt.shipper, n, bytes.fromhex(receipt.root[7:]))
        segment = msgspec.structs.replace(receipt.segment, name=name)
        out.append(msgspec.structs.replace(receipt, n=n, segment=segment))
    return sorted(out, key=lambda r: (r.shipper, r.n))


def _may_hold(receipt: Receipt, types: Any, steps: Any, samples: Any) -> bool:
    """What `holding` promises, said slowly."""

    def any_of(names: Any) -> bool:
        return any(
            (names is None or t.type in names)
            and (steps is None or (t.min_step is not None and any(t.min_step <= s <= t.max_step for s in steps)))
            for t in receipt.types
        )

    if not (any_of(types) if types is not None or steps is not None else True):
        return False
    if samples is None:
        return True
    others = {t.type for t in receipt.types} - SAMPLE_TYPES if types is None else set(types) - SAMPLE_TYPES
    named = receipt.samples is None or any(encode_samples([s]) in _prints(receipt.samples) for s in samples)
    return named or any_of(others)


def _prints(samples: str) -> list[str]:
    return [samples[i : i + 4] for i in range(0, len(samples), 4)]


@settings(max_examples=80, deadline=None)
@given(
    st.lists(_receipt(), max_size=12).map(_numbered),
    st.none() | st.sets(st.sampled_from(TYPES)),
    st.none() | st.sets(st.integers(0, 40), max_size=2),
    st.none() | st.sets(st.sampled_from([*SAMPLES, "elsewhere"]), max_size=2),
    st.randoms(use_true_random=False),
)
def test_columns_answer_as_the_receipts_do(receipts, types, steps, samples, rng) -> None:
    mixed = rng.sample(receipts, len(receipts))
    columns = Receipts(index.decode(index.encode(_info(receipts), to_table(mixed)), "x").table, LEDGER, RUN)
    assert list(columns.all) == receipts
    wanted = [r for r in receipts if _may_hold(r, types, steps, samples)]
    for held in (columns, Receipts(receipts)):
        assert held.holding(types, steps, samples) == wanted
        assert held.total("bytes") == sum(r.segment.bytes for r in receipts)
        assert held.marks == {r.shipper: r.n for r in receipts}
        for writer_id, said in held.writers.items():
            own = [w for r in receipts for w in r.writers if w.writer_id == writer_id]
            spans = sorted(span for w in own for span in held_ranges(w))
            assert said.ranges == merged(spans)
            assert said.gaps == sum(w.gaps or 0 for w in own)
            assert said.lost_bytes == sum(w.lost_bytes or 0 for w in own)
            assert (said.closed, said.dead) == (any(w.closed for w in own), any(w.dead for w in own))
            assert said.shared == any(b[0] <= a[1] for a, b in pairwise(spans))
        assert list(held.writers) == list(dict.fromkeys(w.writer_id for r in receipts for w in r.writers))
        for name, total in held.types.items():
            own_types = [t for r in receipts for t in r.types if t.type == name]
            assert total.events == sum(t.count for t in own_types)
            known = [s for t in own_types for s in (t.min_step, t.max_step) if s is not None]
            assert (total.first_step, total.last_step) == (min(known, default=None), max(known, default=None))


def _info(receipts: list[Receipt]) -> index.IndexInfo:
    after = {r.shipper: r.n for r in receipts}
    return index.IndexInfo(format=1, ledger_id=LEDGER, run_id=RUN, first=0, last=0, before={}, after=after)


# -- a run that grows, with checkpoints ------------------------------------------------------------------------------


class Counting(FileStore):
    """A local store that notes what it is asked for."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.asked: list[str] = []

    def read(self, path: str) -> bytes:
        self.asked.append(f"read {path}")
        return super().read(path)

    def list(self, prefix: str) -> Iterator[Entry]:
        self.asked.append(f"list {prefix}")
        return super().list(prefix)

    def children(self, prefix: str) -> tuple[str, ...]:
        self.asked.append(f"children {prefix}")
        return super().children(prefix)

    def receipts_read(self) -> int:
        return sum("/receipt/" in call and call.startswith("read") for call in self.asked)


def _grow(url: str, seed: int, rounds: int, checkpoint: bool = True) -> None:
    """Several chains; after each round a checkpoint, except now and then."""
    rng = random.Random(seed)
    for number in range(rounds):
        writer = f"{seed * 1000 + number:032x}"
        count = rng.randint(1, 6)
        records = [
            event(
                RUN, writer, i, "logprobs", sample_id=f"{number}-{i}", source="rollout", contract_id="c", values=[0.1]
            )
            for i in range(count)
        ]
        build(url, RUN, records, per_segment=rng.randint(1, 3))
        if checkpoint and rng.random() < 0.8:
            checkpoints.make(open_store(url), RUN)


def _plain(receipts: Any) -> list[Receipt]:
    return [msgspec.structs.replace(r, previous=None, signature=None) for r in receipts]


def _truth(url: str) -> list[Receipt]:
    source = index.Source(open_store(url), "", RUN, lambda path, error: pytest.fail(f"{path}: {error}"))
    return _plain(source.everything())


def _indexes(url: str) -> list[Path]:
    return sorted(Path(url, "runs", RUN, "index").glob("*"))


@pytest.mark.parametrize("seed", range(2))
def test_every_state_of_the_indexes_gives_every_receipt_once(url: str, seed: int) -> None:
    _grow(url, seed, 12)
    truth, files = _truth(url), _indexes(url)
    assert files
    rng = random.Random(seed)
    for _ in range(6):
        copy = Path(url).with_name("copy")
        shutil.copytree(url, copy)
        for path in _indexes(str(copy)):
            fate = rng.choice(["kept", "kept", "gone", "cut", "flipped"])
            data = bytearray(path.read_bytes())
            if fate == "gone":
                path.unlink()
            elif fate == "cut":
                path.write_bytes(data[: rng.randrange(len(data))])
            elif fate == "flipped":
                data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
                path.write_bytes(data)
        run = Run(open_store(str(copy)), RUN)
        assert _plain(run.receipts) == truth
        assert _plain(run.intact_receipts()) == truth
        checkpoints.make(open_store(str(copy)), RUN)  # goes on over whatever is left
        build(str(copy), RUN, [event(RUN, "9" * 32, 0, "weights.loaded", **LOADED)])
        assert checkpoints.make(open_store(str(copy)), RUN) is not None
        assert _plain(Run(open_store(str(copy)), RUN).receipts) == _truth(str(copy))
        shutil.rmtree(copy)


def test_an_index_costs_no_receipt_but_the_tail(url: str) -> None:
    _grow(url, 7, 9)
    checkpoints.make(open_store(url), RUN)
    store = Counting(Path(url))
    assert _plain(Run(store, RUN).receipts) == _truth(url)
    chains = len({r.shipper for r in _truth(url)})
    assert store.receipts_read() == chains  # one look for what follows in each
    assert not any(call.startswith("list") or "segment" in call for call in store.asked)
    listed = sorted(call.rpartition("/")[2] for call in store.asked if call.startswith("children"))
    assert listed == ["index", "receipt"], "the two listings there are, and none of segments"
    files = sum("/index/" in call for call in store.asked)
    assert files <= len(_indexes(url)).bit_length() + 1


def test_the_tail_of_a_long_chain_is_read_and_ends_where_it_ends(url: str) -> None:
    records = [event(RUN, "a" * 32, i, "weights.loaded", **LOADED) for i in range(40)]
    build(url, RUN, records[:3], per_segment=1)
    newest = checkpoints.make(open_store(url), RUN)
    assert newest is not None
    chain = build(url, RUN, records[3:], per_segment=1)
    assert _plain(chain.run(RUN).receipts) == _truth(url)
    # the second build began a chain of its own: let the first one grow too
    (first,) = [s for s, n in newest.info.marks.items()]
    folder = Path(url, "runs", RUN, "receipt", first)
    last = msgspec.json.decode((folder / "00000002.json").read_bytes())
    for n in range(3, 12):
        receipt = msgspec.convert({**last, "n": n, "segment": {**last["segment"]}}, Receipt)
        name = layout.segment_name(first, n, bytes.fromhex(receipt.root[7:]))
        receipt = msgspec.structs.replace(receipt, segment=msgspec.structs.replace(receipt.segment, name=name))
        (folder / f"{n:08d}.json").write_bytes(encode_receipt(receipt))
        assert _plain(Run(open_store(url), RUN).receipts) == _truth(url), n


def test_two_that_write_one_index_at_once_make_one_object(url: str) -> None:
    _grow(url, 3, 6)
    newest = checkpoints.latest(open_store(url), RUN)
    assert newest is not None
    for path in _indexes(url):
        if path.name.startswith(f"{newest.k:08d}"):
            path.unlink()
    made: list[str] = []
    threads = [
        threading.Thread(target=lambda: made.append(index.write(open_store(url), RUN, newest))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 4
    assert len(set(made)) == 1
    assert verify(url).exit_code == 0


def test_without_its_index_a_checkpoint_and_those_before_it_can_be_indexed_again(url: str) -> None:
    _grow(url, 5, 16)
    every = {path.name: path.read_bytes() for path in _indexes(url)}
    shutil.rmtree(Path(url, "runs", RUN, "index"))
    for checkpoint in reversed(checkpoints.read_checkpoints(open_store(url), RUN)):
        index.write(open_store(url), RUN, checkpoint)
    assert {path.name: path.read_bytes() for path in _indexes(url)} == every


def test_no_index_is_written_of_a_receipt_that_is_not_the_one_covered(url: str) -> None:
    _grow(url, 2, 4)
    newest = checkpoints.latest(open_store(url), RUN)
    assert newest is not None
    shipper, first, _ = newest.info.appended[0]
    path = Path(url, layout.receipt_path(RUN, shipper, first))
    path.write_bytes(path.read_bytes().replace(b'"rows":', b'"rowz":'))
    with pytest.raises(LedgerError, match="is not the receipt that checkpoint"):
        index.write(open_store(url), RUN, newest)


# -- an index that lies ----------------------------------------------------------------------------------------------


def _forged(url: str, change: Any) -> Path:
    """The newest index replaced by one with another content and the name that belongs to it."""
    path = _indexes(url)[-1]
    part = index.decode(path.read_bytes(), "x")
    receipts = list(Receipts(part.table, part.info.ledger_id, RUN).all)
    info, receipts = change(part.info, receipts)
    data = index.encode(info, to_table(receipts))
    path.unlink()
    fresh = Path(url, layout.index_path(RUN, part.info.last, hashlib.sha256(data).digest()))
    fresh.write_bytes(data)
    return fresh


def _other_rows(info: Any, receipts: list[Receipt]) -> Any:
    other = msgspec.structs.replace(receipts[0], wall_us=7)
    return info, [other, *receipts[1:]]


def _other_samples(info: Any, receipts: list[Receipt]) -> Any:
    return info, [msgspec.structs.replace(receipts[0], samples=""), *receipts[1:]]


def _left_out(info: Any, receipts: list[Receipt]) -> Any:
    return info, receipts[1:]


def _twice(info: Any, receipts: list[Receipt]) -> Any:
    return info, [*receipts, receipts[0]]


def _invented(info: Any, receipts: list[Receipt]) -> Any:
    made = msgspec.structs.replace(receipts[-1], shipper="7" * 32, n=0)
    name = layout.segment_name("7" * 32, 0, bytes.fromhex(made.root[7:]))
    made = msgspec.structs.replace(made, segment=msgspec.structs.replace(made.segment, name=name))
    return msgspec.structs.replace(info, after={**info.after, "7" * 32: 0}), [*receipts, made]


def _other_run(info: Any, receipts: list[Receipt]) -> Any:
    return msgspec.structs.replace(info, run_id="r2"), receipts


def _other_ledger(info: Any, receipts: list[Receipt]) -> Any:
    return msgspec.structs.replace(info, ledger_id="7" * 32), receipts


@pytest.mark.parametrize(
    "change", [_other_rows, _other_samples, _left_out, _twice, _invented, _other_run, _other_ledger]
)
def test_an_index_that_lies_is_found(url: str, change: Any) -> None:
    _grow(url, 1, 6)
    assert verify(url).exit_code == 0
    path = _forged(url, change)
    result = verify(url)
    assert result.exit_code == 1
    assert {(f.kind, f.object) for f in result.findings if f.severity == "error"} == {
        ("index.differs", path.relative_to(url).as_posix())
    }


def _marked(**marks: Any) -> Any:
    def change(info: Any, receipts: list[Receipt]) -> Any:
        return msgspec.structs.replace(info, **{name: of(info) for name, of in marks.items()}), receipts

    return change


MANY = 10**15
_LIES_OF_PLACES = {
    "rows left out": _left_out,
    "a row twice": _twice,
    "no rows": lambda info, receipts: (info, []),
    "after, far": _marked(after=lambda info: {**info.after, sorted(info.after)[0]: MANY}),
    "before, far": _marked(before=lambda info: {**info.before, sorted(info.after)[0]: MANY}),
    "both, far": _marked(
        before=lambda info: {**info.before, "7" * 32: MANY}, after=lambda info: {**info.after, "7" * 32: MANY}
    ),
    "no shipper": _marked(before=lambda info: {**info.before, "../..": 3}, after=lambda i: {**i.after, "../..": 3}),
    "below 0": _marked(before=lambda info: {**info.before, sorted(info.after)[0]: -7}),
}


@pytest.mark.parametrize("lie", _LIES_OF_PLACES)
def test_an_index_whose_rows_are_not_what_its_marks_say_hides_nothing_and_costs_nothing(url: str, lie: str) -> None:
    """Readers pass it over, or say that what it names is gone; nobody counts to what its marks claim."""
    _grow(url, 1, 6)
    truth = _truth(url)
    path = _forged(url, _LIES_OF_PLACES[lie])
    assert verify(url).exit_code == 1
    run = Run(open_store(url), RUN)
    if lie == "both, far":
        with pytest.raises(LedgerError, match="is gone"):
            _ = run.receipts
        assert {r.self_ for r in truth} <= {r.self_ for r in run.intact_receipts()}
    else:
        assert _plain(run.receipts) == truth
    path.unlink()
    assert verify(url).exit_code == 0


def test_any_bit_of_an_index_flipped_is_found(url: str) -> None:
    _grow(url, 1, 3)
    path = _indexes(url)[0]
    data = path.read_bytes()
    for at in random.Random(0).sample(range(len(data) * 8), 25):
        flipped = bytearray(data)
        flipped[at // 8] ^= 1 << at % 8
        path.write_bytes(flipped)
        found = [f for f in verify(url).findings if f.severity == "error"]
        assert [f.kind for f in found] == ["index.changed"]
    path.write_bytes(data)
    path.rename(path.with_name("notes.txt"))
    assert [f.kind for f in verify(url).findings if f.severity == "error"] == ["object.unknown"]


# -- those who ask ---------------------------------------------------------------------------------------------------


def test_a_shipper_that_takes_over_knows_from_the_index_what_is_committed(url: str, spool: Path, new_writer) -> None:
    writer = new_writer()
    writer.many(5)
    Shipper(spool).cycle(flush=True)
    checkpoints.make(open_store(url), RUN)
    _grow(url, 4, 5)
    checkpoints.make(open_store(url), RUN)
    writer.many(2)
    stores: list[Counting] = []

    def open_(where: str) -> Counting:
        stores.append(Counting(Path(where)))
        return stores[-1]

    second = Shipper(spool, open_)
    second.cycle(flush=True)
    assert second.errors() == []
    outbox: Outbox = next(iter(second.outboxes.values()))
    assert outbox.known == {writer.writer_id: 5}
    chains = len({r.shipper for r in _truth(url)})
    assert sum(store.receipts_read() for store in stores) <= chains + 1  # a look after each, and its own read back
    events = [seq for w, seq, _, _ in open_ledger(url).read_events(RUN) if w == writer.writer_id]
    assert sorted(events) == list(range(7))
    assert verify(url).exit_code == 0


@pytest.mark.parametrize("view", ["samples", "logprobs", "tokens"])
def test_a_query_for_one_sample_opens_its_segments_only_and_answers_the_same(url: str, view: str) -> None:
    records = []
    for i in range(30):
        ids = {"sample_id": f"s{i}", "step": i}
        records += [
            event(RUN, "a" * 32, 2 * i, "rollout.sample", response_token_ids=[1, 2], loss_mask=[1, 1], **ids),
            event(RUN, "a" * 32, 2 * i + 1, "logprobs", source="rollout", contract_id="c", values=[0.5, i], **ids),
        ]
    build(url, RUN, records, per_segment=2)
    checkpoints.make(open_store(url), RUN)
    led = open_ledger(url)
    everything = led.sql(f"select * from {view} where run_id = '{RUN}'").arrow().to_pylist()
    store = Counting(Path(url))
    led.store = store
    led.forget(RUN)
    found = led.sql(f"select * from {view} where run_id = $run and sample_id = $id", {"run": RUN, "id": "s7"}).arrow()
    assert found.to_pylist() == [row for row in everything if row["sample_id"] == "s7"]
    assert len(found) > 0
    assert len({call for call in store.asked if "/segment/" in call}) == 1


def test_a_query_for_one_step_opens_its_segments_only(url: str) -> None:
    records = [
        event(RUN, "a" * 32, i, "knob.applied", path="p", requested=i, status="applied", step=i) for i in range(20)
    ]
    build(url, RUN, records, per_segment=2)
    led = open_ledger(url)
    led.store = store = Counting(Path(url))
    rows = led.sql(f"select requested from knobs where run_id = '{RUN}' and step = 7").arrow().to_pylist()
    assert [json.loads(str(row["requested"])) for row in rows] == [7]
    assert len([call for call in store.asked if "/segment/" in call]) == 1


def test_an_id_that_is_no_text_makes_a_segment_say_nothing_of_its_samples(url: str) -> None:
    record = event(RUN, "a" * 32, 0, "logprobs", sample_id="s", source="rollout", contract_id="c", values=[0.5])
    fields = {**decode_envelope(record.envelope), "sample_id": 1.5}
    build(url, RUN, [("a" * 32, 0, fields, record.arrays)])
    (receipt,) = open_ledger(url).run(RUN).receipts
    assert receipt.samples is None
