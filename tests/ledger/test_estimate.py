"""`doctor --estimate` against a run that is really recorded and shipped: bytes and requests, counted."""

import json
from pathlib import Path

import numpy as np
import pytest

import rlk_ledger
from rlk_ledger import cli
from rlk_ledger.doctor.estimate import REQUESTS, Amount, CountingStore, estimate
from rlk_ledger.doctor.workload import Maker, Workload
from rlk_ledger.shipper import Shipper
from rlk_ledger.store import open_store
from rlk_ledger_schemas.errors import UsageError
from rlk_ledger_sdk import api

BYTES_WITHIN, REQUESTS_WITHIN = 1.15, 1.6
"""The stated factors: what was estimated is at most this much more, or less, than what was measured."""


def record_run(url: str, spool: Path, work: Workload, rng: np.random.Generator) -> None:
    """A run of the workload's shape through the public API, with other token ids and values than the estimate's."""
    rlk_ledger.init(
        url, run_id="r1", role="rollout", spool=spool, shipper="off", redaction=work.redaction, on_error="raise"
    )
    contract = rlk_ledger.record(
        "contract.declared", kind="logprob", version="1", body={"mode": "processed"}
    ).contract_id
    for number in range(work.samples):
        tokens = np.exp(rng.uniform(0, np.log(150_000), work.response)).astype(np.int32)
        group = f"group-{number // work.group}"
        with rlk_ledger.scope(step=number // 64):
            if number % work.group == 0:
                prompt = np.exp(rng.uniform(0, np.log(150_000), work.prompt)).astype(np.int32)
                rlk_ledger.record("prompt.recorded", prompt_id=group, token_ids=prompt)
            rlk_ledger.record(
                "rollout.sample",
                sample_id=f"s-{number}",
                group_id=group,
                prompt_id=group,
                response_token_ids=tokens,
                loss_mask=np.ones(work.response, np.uint8),
                weight_spans=[{"version": f"v{number // 64}", "start": 0, "end": work.response}],
                engine="rollout-0",
            )
            values = -rng.exponential(0.5, work.response).astype(np.float32)
            for source in ("rollout", "training"):
                rlk_ledger.record(
                    "logprobs",
                    sample_id=f"s-{number}",
                    source=source,
                    values=values + rng.normal(0, 0.01, work.response).astype(np.float32),
                    contract_id=contract,
                    weight_version=f"v{number // 64}",
                )
    rlk_ledger.close()


@pytest.fixture
def recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RLK_CHECKPOINT_S", "300")
    monkeypatch.setenv("RLK_REDACTION_KEY", "0123456789abcdef" * 4)

    def run(work: Workload) -> Amount:
        stores: list[CountingStore] = []

        def open_(url: str) -> CountingStore:
            if not stores:
                stores.append(CountingStore(open_store(url)))
            return stores[0]

        record_run(str(tmp_path / "ledger"), tmp_path / "spool", work, np.random.default_rng(7))
        shipper = Shipper(tmp_path / "spool", open_)
        while shipper.cycle(flush=True):
            assert not shipper.errors()
        shipper.close()
        return stores[0].amount()

    yield run
    api.close()


def near(estimated: float, measured: float, factor: float) -> bool:
    return measured / factor <= estimated <= measured * factor


@pytest.mark.parametrize("redaction", ["none", "hash"])
def test_the_bytes_of_a_real_run_are_within_the_stated_factor(recorded, redaction: str) -> None:
    parts = ("ids", "rollout", "training")
    work = Workload(
        tokens=200_000, response=400, prompt=200, group=4, processes=1, hours=0.01, parts=parts, redaction=redaction
    )
    measured, expected = recorded(work), estimate(work)
    assert near(expected.total.bytes, measured.bytes, BYTES_WITHIN), (expected.total, measured)


def test_the_requests_of_a_run_with_many_segments_are_within_the_stated_factor(tmp_path: Path, monkeypatch) -> None:
    """Eight flushes, each a segment, and a checkpoint at the end of each: counted at the store."""
    from rlk_ledger.checkpoints import make

    work = Workload(
        tokens=8 * 1000, response=100, prompt=10, group=1, processes=0, hours=0.1, flush=45.0, checkpoint=45.0
    )
    store = CountingStore(open_store(str(tmp_path / "ledger")))
    monkeypatch.setenv("RLK_CHECKPOINT_S", "0")
    rlk_ledger.init(tmp_path / "ledger", run_id="r1", spool=tmp_path / "spool", shipper="off")
    shipper = Shipper(tmp_path / "spool", lambda url: store)
    known = None
    try:
        for i in range(8):
            rlk_ledger.record("weights.published", weight_version=f"v{i}", digest="sha256:00", tensor_count=1)
            shipper.cycle(flush=True)
            assert not shipper.errors()
            known = make(store, "r1", None, known) or known
    finally:
        shipper.close()
        api.close(timeout=0)
    measured = store.amount().requests
    expected = estimate(work)
    assert (expected.segments, expected.checkpoints) == (8, 8)
    for verb in REQUESTS:
        assert near(expected.total.requests[verb], measured[verb], REQUESTS_WITHIN), (verb, expected, measured)


def test_what_is_recorded_and_how_long_the_run_lasts_is_what_counts() -> None:
    base = Workload(tokens=100_000, hours=1.0)
    whole, ids = estimate(base), estimate(Workload(tokens=100_000, hours=1.0, parts=("ids",)))
    twice = estimate(Workload(tokens=100_000, hours=1.0, passes=2))
    assert ids.total.bytes < whole.total.bytes < twice.total.bytes
    assert ids.events < whole.events < twice.events
    longer = estimate(Workload(tokens=100_000, hours=10.0))
    assert longer.segments > 5 * whole.segments
    assert longer.per_million().requests["PUT"] > whole.per_million().requests["PUT"]
    assert estimate(Workload(tokens=100_000, checkpoint=0)).checkpoints == 0
    hashed, dropped = (estimate(Workload(tokens=100_000, redaction=mode)) for mode in ("hash", "drop"))
    assert dropped.total.bytes < whole.total.bytes < hashed.total.bytes


@pytest.mark.parametrize(
    ("work", "samples", "events", "segments", "checkpoints"),
    [
        # 1954 samples of 3 events, a prompt for 8 of them, a layout for 64; 6 rolls of 10 minutes and 2 last flushes
        (Workload(), 1954, 6137, 6 + 2, 8),
        # on each of 3 nodes 12 rolls, and 10 last flushes; 24 periods of 5 minutes, and one when each node leaves
        (Workload(nodes=3, processes=10, hours=2.0), 1954, 6137, 3 * 12 + 10, 24 + 3),
        # a flush a minute, and a checkpoint at each end of a node
        (Workload(nodes=2, processes=2, hours=0.5, flush=60.0, checkpoint=3600.0), 1954, 6137, 2 * 30 + 2, 1 + 2),
    ],
)
def test_how_often_things_happen_is_what_a_hand_counts(
    work: Workload, samples: int, events: int, segments: int, checkpoints: int
) -> None:
    said = estimate(work)
    assert (said.samples, said.events, said.segments, said.checkpoints) == (samples, events, segments, checkpoints)


def test_the_numbers_for_a_million_tokens_do_not_depend_on_how_many_there_are() -> None:
    few, many = (estimate(Workload(tokens=tokens, hours=100.0 * tokens / 1e9)) for tokens in (10**8, 10**9))
    assert near(few.per_million().bytes, many.per_million().bytes, 1.05)


def test_generated_events_are_the_same_every_time_and_numbered_on() -> None:
    made = [Maker(Workload(response=20, prompt=4), "r1", "ab" * 16) for _ in range(2)]
    first, again = (maker.samples(3) + maker.samples(2) for maker in made)
    assert [record.leaf for record in first] == [record.leaf for record in again]
    assert [record.seq for record in first] == list(range(len(first)))


def test_the_command_prints_both_forms_and_refuses_an_unknown_part(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--estimate", "--tokens", "50000", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["per_million_tokens"]["requests"].keys() == set(REQUESTS)
    assert document["per_million_tokens"]["bytes"] > 1e6
    assert cli.main(["doctor", "--estimate", "--tokens", "50000"]) == 0
    out = capsys.readouterr().out
    assert "per million tokens" in out
    assert "real token ids may compress better" in out
    assert cli.main(["doctor", "--tokens", "50000"]) == 2, "and not a check of the machine"
    assert "give --estimate with it" in capsys.readouterr().err
    assert cli.main(["doctor", "--estimate", "--record", "ids,tokens"]) == 2
    assert "choose from ids, rollout, training, layouts" in capsys.readouterr().err
    with pytest.raises(UsageError, match="is empty"):
        Workload.of({"record": " , "})
