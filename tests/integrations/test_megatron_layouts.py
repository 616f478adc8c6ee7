"""Megatron's cuts of a batch - tensor, context and packed - without Megatron: what ranks record merges into the values.

The cuts are made here by index, as the engine's own documentation describes them, and not with the code under test.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import rlk_ledger
from rlk_ledger.audit import audit
from rlk_ledger.history import History, load_history
from rlk_ledger.ledger import open_ledger
from rlk_ledger.pairs import pair
from rlk_ledger.service import ship_once
from rlk_ledger_schemas.errors import UsageError
from rlk_ledger_sdk.integrations.megatron.layout import chunks, layout_of
from rlk_ledger_sdk.integrations.megatron.place import Axis, Place
from rlk_ledger_sdk.integrations.megatron.scoring import Scoring, Vocabulary
from rlk_ledger_sdk.testing import capture

VOCAB, TEMPERATURE = 24, 0.7
PROMPTS, RESPONSES = [3, 5, 1], [6, 9, 4]
NAMES = ["a", "b", "c"]
ALONE = Axis(0, 1)


class Watched:
    """What a pass asks of its watch."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.engine = "training-0"
        self._number = -1

    def logprob_contract(self, logits: Any, temperature: float) -> str:
        body = {"mode": "processed", "temperature": temperature, "compute_dtype": "float32"}
        return str(rlk_ledger.record("contract.declared", kind="logprob", version="1", body=body).contract_id)

    def next_layout(self) -> int:
        self._number += 1
        return self._number


def place(tp: Axis = ALONE, cp: Axis = ALONE) -> Place:
    return Place(cp.rank * tp.size + tp.rank, cp.size * tp.size, tp, cp, ALONE, ALONE, ALONE)


def rows() -> tuple[list[list[int]], list[torch.Tensor]]:
    """Token ids and full logits [length, VOCAB] of every sample."""
    torch.manual_seed(1)
    ids = [torch.randint(0, VOCAB, (p + r,)).tolist() for p, r in zip(PROMPTS, RESPONSES)]
    return ids, [torch.randn(len(one), VOCAB) * 3 for one in ids]


def expected() -> list[list[float]]:
    """Log-probabilities of the response tokens, straight from the full logits."""
    out = []
    for ids, logits, p in zip(*rows(), PROMPTS):
        values = torch.log_softmax(logits / TEMPERATURE, -1)
        out.append([float(values[g - 1, ids[g]]) for g in range(p, len(ids))])
    return out


def zigzag(logits: torch.Tensor, width: int, cp: Axis) -> torch.Tensor:
    """What a context rank holds of a row padded to `width`: of 2 x size equal parts the rank-th and its mirror."""
    whole = torch.cat([logits, torch.full((width - len(logits), VOCAB), 9.0)])
    if cp.size == 1:
        return whole
    parts = whole.reshape(2 * cp.size, -1, VOCAB)
    return torch.cat([parts[cp.rank], parts[2 * cp.size - 1 - cp.rank]])


def local(packed: bool, widths: list[int], tp: Axis, cp: Axis, gathered: bool = False) -> torch.Tensor:
    """The rank's logits [S, B, v] of the whole micro-batch; `gathered`: over the whole vocabulary."""
    held = [zigzag(logits, width, cp) for logits, width in zip(rows()[1], widths)]
    whole = torch.cat(held)[:, None] if packed else torch.stack(held, dim=1)
    return whole if gathered else whole.chunk(tp.size, dim=-1)[tp.rank]


def score(tp: Axis, cp: Axis, packed: bool, **options: Any) -> None:
    """One rank's pass over the micro-batch, its logits given to the hook by hand."""
    multiple = 2 * cp.size if cp.size > 1 else 1
    lengths = [-(-(p + r) // multiple) * multiple for p, r in zip(PROMPTS, RESPONSES)]
    widths = lengths if packed else [max(lengths)] * 3
    scored = Scoring(
        Watched(place(tp, cp)),
        Vocabulary(VOCAB, options.pop("counted", VOCAB), VOCAB),
        pass_id=options.pop("pass_id", "logprob"),
        weight_version="v0",
        source="training",
        temperature=TEMPERATURE,
        group=None,
    )
    masks = [[1] * r for r in RESPONSES]
    scored.batch(NAMES, rows()[0], RESPONSES, masks, packed=packed)
    logits = local(packed, widths, tp, cp, options.pop("gathered", False))
    scored.saw_logits(logits + options.pop("shifted", 0.0) * torch.arange(VOCAB)[: logits.shape[-1]])
    scored.settle()


def record_everything(
    root: Path, tp: int, cp: int, packed: bool, without: int | None = None, gathered: bool = False, shifted: float = 0.0
) -> None:
    """The rollout side and every rank of the training side, one writer each."""
    common = {"run_id": "r", "roles": {"rollout": 1, "training": tp * cp}, "spool": str(root / "spool")}
    rlk_ledger.init(root / "ledger", role="rollout", shipper="off", **common)
    contract = Watched(place()).logprob_contract(None, TEMPERATURE)
    for name, ids, p, values in zip(NAMES, rows()[0], PROMPTS, expected()):
        n = len(values)
        span = {"version": "v0", "start": 0, "end": n}
        rlk_ledger.record(
            "rollout.sample",
            sample_id=name,
            prompt_token_ids=ids[:p],
            response_token_ids=ids[p:],
            loss_mask=[1] * n,
            weight_spans=[span],
        )
        fields = {"sample_id": name, "values": values, "contract_id": contract, "weight_version": "v0"}
        rlk_ledger.record("logprobs", source="rollout", **fields)
    for rank in range(tp * cp):
        if rank == without:
            continue
        axes = {"tp": Axis(rank % tp, tp), "cp": Axis(rank // tp, cp)}
        parallel = {name: {"rank": axis.rank, "size": axis.size} for name, axis in axes.items()}
        options = {"rank": rank, "world_size": tp * cp, "parallel": parallel, "shipper": "off"}
        rlk_ledger.init(root / "ledger", role="training", **options, **common)
        for pass_id in ("logprob", "train", "train"):  # two inner epochs
            shift = shifted if rank == tp * cp - 1 else 0.0
            score(axes["tp"], axes["cp"], packed, pass_id=pass_id, gathered=gathered, shifted=shift)
    rlk_ledger.close()


def history(root: Path) -> History:
    ship_once(root / "spool")
    return load_history(open_ledger(root / "ledger"), "r")


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    yield
    rlk_ledger.close()


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize(
    ("tp", "cp", "gathered"),
    [
        (1, 1, False),
        (2, 1, False),
        (3, 1, False),
        (1, 2, False),
        (1, 3, False),
        (2, 2, False),
        (2, 3, False),
        (2, 1, True),
        (2, 2, True),
    ],
)
def test_every_cut_merges_into_the_whole(tmp_path: Path, tp: int, cp: int, gathered: bool, packed: bool) -> None:
    """Claim: whatever the cut, each training pass holds every response token's value, and the audit finds nothing."""
    record_everything(tmp_path, tp, cp, packed, gathered=gathered)
    held = history(tmp_path)
    pairing = pair(held)
    assert len(pairing.pairs) == 3
    assert [later.series.first.pass_id for later in pairing.passes] == ["train", "train"] * 3
    for later in pairing.passes:
        np.testing.assert_allclose(later.series.values, expected()[NAMES.index(later.sample.sample_id)], atol=3e-6)
    for one, values in zip(pairing.pairs, expected()):
        assert one.paired.all()
        np.testing.assert_allclose(one.training, values, rtol=0, atol=3e-6)
        ranks = set(one.rank.tolist())
        assert ranks == {-1} if cp == 1 else ranks <= set(range(cp))
    assert [f.finding_id for f in audit(held).findings if f.severity != "info"] == []


@pytest.mark.parametrize(("tp", "cp"), [(2, 1), (1, 2), (2, 2)])
def test_a_rank_that_recorded_nothing_is_named(tmp_path: Path, tp: int, cp: int) -> None:
    """Claim: without the last rank's events no value is made up, and the shard that is missing has a name."""
    record_everything(tmp_path, tp, cp, packed=False, without=tp * cp - 1)
    found = {f.finding_id: f.where for f in audit(history(tmp_path)).findings}
    assert found["evidence.shards_missing"]["missing_ranks"] == [1]


@pytest.mark.parametrize("cp", [1, 2])
def test_replicas_that_hold_other_bits_are_named(tmp_path: Path, cp: int) -> None:
    """Claim: when a tensor rank that holds whole values disagrees with its replica, both writers are named."""
    record_everything(tmp_path, 2, cp, packed=False, gathered=True, shifted=0.01)
    found = {f.finding_id: f.where for f in audit(history(tmp_path)).findings}
    assert sorted(found["replicas.differ"]["ranks"]) == [2 * cp - 2, 2 * cp - 1]


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_context_ranks_partition_a_row(size: int) -> None:
    """Claim: the chunks of all ranks are every position once, and each rank holds the same number."""
    width = 2 * size * 5
    held = [[p for _, low, high in chunks(width, Axis(r, size)) for p in range(low, high)] for r in range(size)]
    assert sorted(p for rank in held for p in rank) == list(range(width))
    assert {len(rank) for rank in held} == {width // size}


def test_masked_vocabulary_padding_does_not_count() -> None:
    """Claim: under the mask policy the softmax is over the tokens; under include it is over the padding as well."""
    ids, logits = rows()
    with capture(role="training") as recorded:
        score(ALONE, ALONE, False, counted=20)
    event = next(e for e in recorded if e.type == "logprobs" and e.fields["sample_id"] == "a")
    for j, value in enumerate(event.arrays["values"]):
        token = ids[0][PROMPTS[0] + j]
        if token < 20:
            row = logits[0][PROMPTS[0] + j - 1][:20] / TEMPERATURE
            assert value == pytest.approx(float(torch.log_softmax(row, -1)[token]), abs=3e-6)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"response_lengths": [6, 9]}, "give one of each a sample"),
        ({"response_lengths": [6, 9, 5]}, "at least one token before it"),
        ({"loss_masks": [[1] * 6, [1] * 9, [1] * 3]}, "a mask of 3"),
        ({"padded_to": 12}, "each must hold its row"),
    ],
)
def test_a_batch_that_does_not_fit_is_refused_in_one_sentence(given: dict[str, Any], message: str) -> None:
    """Claim: what is wrong with a described batch is said with its numbers."""
    whole = {"response_lengths": RESPONSES, "loss_masks": None, "packed": False, "padded_to": None} | given
    with pytest.raises(UsageError, match=message):
        layout_of(NAMES, rows()[0], cp=ALONE, **whole)


def test_logits_of_another_shape_than_announced_are_refused() -> None:
    """Claim: a layout the engine did not use is noticed before wrong rows are read."""
    with capture(role="training"):
        scored = Scoring(
            Watched(place()),
            Vocabulary(VOCAB, VOCAB, VOCAB),
            pass_id="p",
            weight_version="v",
            source="training",
            temperature=1.0,
            group=None,
        )
        scored.batch(NAMES, rows()[0], RESPONSES, packed=True)
        with pytest.raises(UsageError, match="say `packed` and `padded_to`"):
            scored.saw_logits(torch.zeros(14, 3, VOCAB))
        with pytest.raises(UsageError, match="no forward reached the output layer"):
            scored.settle()


def test_values_of_a_loss_that_makes_no_logits_are_the_record() -> None:
    """Claim: given values are recorded where the output layer never ran, as measured and without partials."""
    with capture(role="training") as recorded:
        scored = Scoring(
            Watched(place(Axis(1, 2))),
            Vocabulary(VOCAB, VOCAB, VOCAB),
            pass_id="p",
            weight_version="v",
            source="training",
            temperature=1.0,
            group=None,
        )
        scored.batch(NAMES, rows()[0], RESPONSES, packed=True)
        scored.values([torch.tensor(values) for values in expected()])
        scored.settle()
    events = [event for event in recorded if event.type == "logprobs"]
    assert [len(event.arrays["values"]) for event in events] == RESPONSES
    assert all(event.fields["metadata_source"] == {"values": "measured"} for event in events)
    assert all("shard" not in event.fields and list(event.arrays) == ["values"] for event in events)
