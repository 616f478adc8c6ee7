"""diagnose(): the metrics of the offline definitions, in a training process, from whatever a trainer holds."""

import math
import os
import subprocess
import sys
import types
from array import array

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlk_ledger import classes, metrics
from rlk_ledger_schemas.errors import SpoolError, UsageError
from rlk_ledger_schemas.metrics import LIVE, METRICS, SENTINELS, VALUE_CLASSES
from rlk_ledger_sdk import api, scope
from rlk_ledger_sdk.diagnostics import diagnose
from rlk_ledger_sdk.measures import measure
from rlk_ledger_sdk.testing import capture, read_spool

SPECIAL = [math.nan, math.inf, -math.inf, 0.0, -0.0, 1.0, 1e-5, 2e-5, 0.5, -1e-45, -500.0, -1000.0, -65504.0, -3.4e38]
SPECIAL += [*SENTINELS, -9.99, -10.0, -0.01, -0.0100001, 3e38]
ordinary = st.floats(-30, 0, width=32)
value = st.one_of(ordinary, ordinary, st.sampled_from(SPECIAL), st.floats(width=32))
pairs = st.lists(st.tuples(value, value, st.integers(0, 3)), max_size=60)


def offline(rollout, training, active):
    """The offline definition: classes from the bits and from the other side (copies need a whole run), then metrics."""
    r, t = (np.array(v, np.float32) for v in (rollout, training))
    active = np.array(active, np.bool_)
    own = [classes.own_classes(v) for v in (r, t)]
    crossed = classes.cross_classes(r, t, own[0], own[1], active, np.zeros(len(r), np.int64))
    found = [
        np.where(codes == classes.COPIED, mine, codes).astype(np.uint8)
        for codes, mine in zip((crossed.rollout, crossed.training), own)
    ]
    with np.errstate(all="ignore"):
        return metrics.measure(r, t, active=active, classes=(found[0], found[1]))


def agree(seen, told):
    """Equal counts; metrics equal within rounding of float64 sums."""
    assert (seen.tokens, seen.excluded, seen.clamped) == (told.tokens, told.excluded, told.clamped)
    assert set(seen.metrics) == (set(LIVE) if told.tokens else set())
    for name, held in seen.metrics.items():
        assert math.isclose(held, told.values[name], rel_tol=1e-12, abs_tol=1e-15), (name, held, told.values[name])


@settings(max_examples=300, deadline=None)
@given(pairs)
def test_the_live_metrics_are_the_offline_ones_with_numpy_and_without(rows):
    rollout, training, mask = ([row[k] for row in rows] for k in range(3))
    told = offline(rollout, training, [m > 0 for m in mask])
    kept = [(r, t) for r, t, m in rows if m]
    columns = [array("f", side) for side in (zip(*kept) if kept else ((), ()))]
    plain = measure(None, *columns, ([], []))
    fast = measure(np, *(np.array(c, np.float32) for c in columns), ([], []))
    agree(plain, told)
    agree(fast, told)
    if plain.worst:
        assert abs(plain.worst[1]) == abs(fast.worst[1])
    with capture():
        seen = diagnose([rollout], [training], mask=[mask])
    agree(seen, told)
    assert seen.active == len(kept)


@pytest.mark.parametrize("gap", [500.0, -500.0, 1e-7, 0.0])
def test_a_huge_log_ratio_overflows_nothing_and_is_counted(gap):
    rollout, training = [-501.0, -1.0], [-501.0 + gap, -1.0]
    with capture():
        seen = diagnose([rollout], [training])
    agree(seen, offline(rollout, training, [1, 1]))
    assert seen.clamped == (abs(gap) > 20)
    assert all(math.isfinite(v) for v in seen.metrics.values())


def made(seed=0, samples=6, size=40):
    rng = np.random.default_rng(seed)
    rollout = -rng.gamma(1.0, 1.0, (samples, size)).astype(np.float32)
    training = (rollout + rng.normal(0, 0.05, rollout.shape)).astype(np.float32)
    mask = rng.random(rollout.shape) < 0.7
    mask[2] = False
    return rollout, training, mask


SHAPES = {
    "numpy": lambda r, t, m: ((r, t), {"mask": m}),
    "numpy float64": lambda r, t, m: ((r.astype(np.float64), t.astype(np.float64)), {"mask": m.astype(float)}),
    "torch": lambda r, t, m: ((torch.tensor(r), torch.tensor(t, requires_grad=True)), {"mask": torch.tensor(m)}),
    "torch and numpy": lambda r, t, m: ((r, torch.tensor(t)), {"mask": torch.tensor(m).int()}),
    "not contiguous": lambda r, t, m: ((torch.tensor(r.T).T, torch.tensor(t.T).T), {"mask": torch.tensor(m.T).T}),
    "rows of arrays": lambda r, t, m: ((list(r), list(t)), {"mask": list(m)}),
    "rows of tensors": lambda r, t, m: ((list(map(torch.tensor, r)), list(map(torch.tensor, t))), {"mask": list(m)}),
    "lists": lambda r, t, m: ((r.tolist(), t.tolist()), {"mask": m.tolist()}),
    "lists and a tensor": lambda r, t, m: ((r.tolist(), torch.tensor(t)), {"mask": torch.tensor(m)}),
    "packed": lambda r, t, m: ((r.reshape(-1), torch.tensor(t).reshape(-1)), {"mask": m.reshape(-1), **packed(r)}),
    "packed lists": lambda r, t, m: (
        (r.ravel().tolist(), t.ravel().tolist()),
        {"mask": m.ravel().tolist()} | packed(r),
    ),
    "array.array": lambda r, t, m: ((array("f", r.ravel()), array("f", t.ravel())), {"mask": m.ravel()} | packed(r)),
}


def packed(values):
    return {"lengths": [values.shape[1]] * values.shape[0]}


@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_of_a_batch_gives_the_same_answer(shape):
    rollout, training, mask = made()
    sides, options = SHAPES[shape](rollout, training, mask)
    names = [f"s{i}" for i in range(len(rollout))]
    with capture():
        seen = diagnose(*sides, sample_ids=names, **options)
    agree(seen, offline(rollout.ravel(), training.ravel(), mask.ravel()))
    assert (seen.samples, seen.active, seen.zero_active_samples) == (6, int(mask.sum()), 1)
    distance = np.where(mask, abs(training.astype(np.float64) - rollout), -1)
    at = np.unravel_index(distance.argmax(), distance.shape)
    assert (seen.worst["sample_id"], seen.worst["position"]) == (f"s{at[0]}", at[1])


def test_bfloat16_widens_exactly():
    rollout, training, mask = made()
    held = torch.tensor(rollout).bfloat16()
    with capture():
        seen = diagnose(held, torch.tensor(training), mask=torch.tensor(mask))
    agree(seen, offline(held.float().numpy().ravel(), training.ravel(), mask.ravel()))


def test_nothing_of_the_callers_is_changed():
    rollout, training, mask = made()
    tensor = torch.tensor(training, requires_grad=True)
    held = [rollout.tobytes(), tensor.detach().numpy().tobytes(), mask.tobytes()]
    version = tensor._version
    with capture():
        diagnose(rollout, tensor, mask=mask)
    assert held == [rollout.tobytes(), tensor.detach().numpy().tobytes(), mask.tobytes()]
    assert (tensor._version, tensor.grad, tensor.requires_grad) == (version, None, True)


# -- what is no measurement, and what is off-policy --------------------------------------------------------------------


def test_a_value_has_a_class_before_it_has_a_number():
    rollout = [None, -1.0, math.nan, 0.0, -9999.0, 0.1, -math.inf, -1.0]
    training = [-1.0, None, -1.0, -2.0, -1.0, -1.0, -1.0, -1.5]
    with capture():
        seen = diagnose([rollout], [training])
    expected = {"missing", "nan", "defaulted", "sentinel", "impossible", "neg_inf"}
    assert seen.excluded == {f"rollout.{name}": 1 for name in expected} | {"training.missing": 1}
    assert {name.partition(".")[2] for name in seen.excluded} <= set(VALUE_CLASSES)
    assert (seen.tokens, seen.metrics["abs_dlogp_max"], seen.coverage) == (1, 0.5, 0.125)


def test_a_side_that_ends_early_under_a_mask_is_missing_not_shifted():
    with capture():
        seen = diagnose([[-1.0, -2.0]], np.array([[-1.0, -2.5, -3.0]], np.float32), mask=[[1, 1, 1]])
    assert seen.excluded == {"rollout.missing": 1}
    assert (seen.tokens, seen.metrics["abs_dlogp_max"]) == (2, 0.5)
    for short in ([-1.0, -2.0], np.array([-1.0, -2.0], np.float32)):
        with capture():  # as many active tokens as the short side has values, and not the same ones
            seen = diagnose([short], np.array([[-1.0, -2.5, -3.0]], np.float32), mask=[[0, 1, 1]])
        assert (seen.tokens, seen.excluded) == (1, {"rollout.missing": 1})
        assert (seen.worst["position"], seen.metrics["abs_dlogp_max"]) == (1, 0.5)


@pytest.mark.parametrize(
    ("rollout", "training", "mask", "status"),
    [
        ([], [], None, "zero_active_tokens"),
        ([[]], [[]], None, "zero_active_tokens"),
        ([[-1.0]], [[-1.0]], [[0]], "zero_active_tokens"),
        (np.zeros((0, 4), np.float32), np.zeros((0, 4), np.float32), None, "zero_active_tokens"),
        ([[math.nan]], [[-1.0]], None, "nothing_compared"),
        ([[None]], [[-1.0]], None, "nothing_compared"),
    ],
)
def test_nothing_to_compare_is_a_status_and_no_number(rollout, training, mask, status):
    with capture() as events:
        seen = diagnose(rollout, training, mask=mask)
    assert (seen.status, seen.metrics, seen.worst) == (status, {}, None)
    assert events[0].fields["metrics"] == {}


@pytest.mark.parametrize("pure", [False, True])
def test_tokens_of_another_version_are_counted_apart(pure, monkeypatch):
    rollout, training, mask = made()
    spans = [{"version": "v1", "start": 0, "end": 20}, {"version": "v2", "start": 20, "end": 40}]
    versions = ["v2", "v1", "v2", spans, None, [types.SimpleNamespace(version="v2", start=0, end=10)]]
    on = mask.copy()
    on[1] = False
    on[3, :20] = False
    sides = (rollout, training, mask)
    if pure:
        monkeypatch.delitem(sys.modules, "numpy")
        sides = tuple(side.tolist() for side in sides)
    with capture() as events:
        seen = diagnose(sides[0], sides[1], mask=sides[2], rollout_versions=versions, training_version="v2")
        monkeypatch.undo()
    agree(seen, offline(rollout.ravel(), training.ravel(), on.ravel()))
    assert seen.active == mask.sum()
    assert seen.off_policy == mask.sum() - on.sum()
    assert seen.unversioned == mask[4].sum() + mask[5, 10:].sum()
    distance = np.where(on, abs(training.astype(np.float64) - rollout), -1)
    at = np.unravel_index(distance.argmax(), distance.shape)
    assert (seen.worst["sample"], seen.worst["position"]) == at
    assert events[0].fields["weight_version"] == "v2"


@pytest.mark.parametrize("pure", [False, True])
def test_missing_values_keep_their_place_when_off_policy_tokens_leave(pure, monkeypatch):
    """Two kept stretches, the second with a hole: the hole and the worst token are where they were."""
    rollout = [[-1.0, -1.0], [-1.0, None], [None, -1.0, -2.0]]
    training = [[-1.0, -1.25], [-1.0, -1.0], [-1.0, -1.0, -2.5]]
    if pure:
        monkeypatch.delitem(sys.modules, "numpy")
    with capture():
        seen = diagnose(rollout, training, rollout_versions=["v2", "v1", "v2"], training_version="v2")
        monkeypatch.undo()
    assert (seen.off_policy, seen.tokens, seen.excluded) == (2, 4, {"rollout.missing": 1})
    assert (seen.worst["sample"], seen.worst["position"]) == (2, 2)
    assert seen.metrics["abs_dlogp_mean"] == 0.1875


# -- the record --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("consistency", ["audit", "strict"])
def test_what_is_returned_is_what_is_recorded(opened, consistency):
    recorder = opened(mode={"consistency": consistency})
    rollout, training, mask = made()
    with scope(step=7):
        seen = diagnose(rollout, training, mask=mask, pass_id="p1", thresholds={"kl_k3": 1e-9, "clip_fraction": 1.0})
    event = read_spool(recorder.directory).events[-1]
    assert (event.type, event.seq, event.fields["step"]) == ("drift.diagnosed", seen.reference.seq, 7)
    assert event.fields["metrics"] == seen.metrics
    assert event.fields["pass_id"] == "p1"
    assert (seen.exceeded, event.fields["exceeded"]) == (("kl_k3",), ["kl_k3"])
    assert event.fields["thresholds"] == {"kl_k3": 1e-9, "clip_fraction": 1.0}


OVERLAP = [{"version": "v", "start": 0, "end": 2}, {"version": "w", "start": 1, "end": 2}]
BAD = [
    (([[-1.0]], [[-1.0, -2.0]]), {}, "sample 0 has 1 rollout and 2 training"),
    (([[-1.0]], [[-1.0], [-2.0]]), {}, "different numbers of samples"),
    ((np.zeros((2, 3)), np.zeros((2, 4))), {}, r"shape \(2, 3\), training \(2, 4\)"),
    ((np.zeros((2, 3)), np.zeros((2, 3))), {"mask": np.ones(3)}, "mask"),
    (([[-1.0, -1.0]], [[-1.0, -1.0]]), {"mask": [[1]]}, "2 values for a mask of 1"),
    (([-1.0, -2.0], [-1.0, -2.0]), {"lengths": [1, 2]}, "lengths add up to 3"),
    (([["a"]], [[-1.0]]), {}, "no number"),
    (("text", [[-1.0]]), {}, "must be an array, a tensor or a list"),
    ((None, [[-1.0]]), {}, "must be an array, a tensor or a list"),
    (([[-1.0]], [[-1.0]]), {"sample_ids": ["a", "b"]}, "2 sample_ids for 1 samples"),
    (([[-1.0]], [[-1.0]]), {"rollout_versions": [], "training_version": "v"}, "0 rollout_versions"),
    (([[-1.0, -1.0]], [[-1.0, -1.0]]), {"rollout_versions": [OVERLAP], "training_version": "v"}, "sample 0 overlap"),
    (([[-1.0]], [[-1.0]]), {"thresholds": {"kl_k4": 1.0}}, "did you mean 'kl_k"),
    (([[-1.0]], [[-1.0]]), {"thresholds": {"kl_k3": -1.0}}, "thresholds"),
    (([[-1.0]], [[-1.0]]), {"thresholds": {"kl_k3": math.nan}}, "thresholds"),
    (([[-1.0]], [[-1.0]]), {"thresholds": {"kl_k3": math.inf}}, "must be finite"),
    (([[-1.0]], [[-1.0]]), {"thresholds": {"kl_k3": "much"}}, "could not convert"),
]


@pytest.mark.parametrize(("sides", "options", "says"), BAD)
def test_a_mistake_raises_under_tests_and_is_a_gap_in_production(opened, sides, options, says):
    with capture(), pytest.raises((UsageError, ValueError), match=says):
        diagnose(*sides, **options)
    recorder = opened(on_error="warn")
    seen = diagnose(*sides, **options)
    assert read_spool(recorder.directory).events[-1].type == "gap"
    assert seen.reference.seq is None


def test_hostile_objects_never_reach_the_step(opened):
    class Hostile:
        ndim = 2

        @property
        def shape(self):
            raise RuntimeError("no")

        def __getitem__(self, key):
            raise RuntimeError("no")

    recorder = opened(on_error="warn")
    assert diagnose(Hostile(), Hostile()).status == "failed"
    assert diagnose([Hostile()], [Hostile()]).status == "failed"
    gaps = [e.fields["kind"] for e in read_spool(recorder.directory).events if e.type == "gap"]
    assert len(gaps) == 2


def test_a_spool_without_room_is_strict_about_diagnoses_too(opened):
    opened(mode={"consistency": "strict"}, budget_bytes=1 << 20, block_ms=0)
    ids = [f"{'x' * 400}{i}" for i in range(6)]
    rollout, training, mask = made()

    def fill():
        for _ in range(20_000):
            diagnose(rollout, training, mask=mask, sample_ids=ids)

    with pytest.raises(SpoolError, match="consistency is strict"):
        fill()


def test_without_numpy_in_the_process_nothing_imports_it():
    code = (
        "import sys\n"
        "from rlk_ledger_sdk.testing import capture\n"
        "from rlk_ledger_sdk.diagnostics import diagnose\n"
        "from rlk_ledger_sdk.admission import admit\n"
        "with capture() as events:\n"
        "    seen = diagnose([[-1.0, None, -2.0]], [[-1.5, -1.0, -2.0]], mask=[[1, 1, 1]])\n"
        "    admit([{'sample_id': 's', 'loss_mask': [1], 'response_token_ids': [1], 'logprobs': [-1.0]}])\n"
        "assert (seen.tokens, seen.metrics['abs_dlogp_mean']) == (2, 0.25), seen\n"
        "assert not {'numpy', 'torch'} & set(sys.modules)\n"
    )
    environment = {k: v for k, v in os.environ.items() if not k.startswith("RLK_")}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)


def test_the_live_metrics_are_defined_ones():
    assert set(LIVE) <= set(METRICS)
    assert not api.current().enabled
