"""The mode in force: who decides it, who inherits it, what the recorder does in each of the nine pairs."""

import gc
import itertools
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from rlk_ledger_schemas.errors import AdmissionError, ConfigError
from rlk_ledger_schemas.modes import CONSISTENCY, FAST
from rlk_ledger_sdk import api
from rlk_ledger_sdk.admission import admit
from rlk_ledger_sdk.diagnostics import diagnose
from rlk_ledger_sdk.modes import Mode, load_mode
from rlk_ledger_sdk.scope import scope
from rlk_ledger_sdk.testing import read_spool

PAIRS = [dict(zip(("fast", "consistency"), pair)) for pair in itertools.product(FAST, CONSISTENCY)]
EMPTY_SAMPLE = {"sample_id": "s0", "response_token_ids": [1, 2], "loss_mask": [1, 1]}
ROLLOUT, TRAINING = [[-0.5, -1.0]], [[-0.5, -1.25]]


def ident(mode):
    return f"{mode['fast']}-{mode['consistency']}"


def environment(monkeypatch, mode):
    monkeypatch.setenv("RLK_FAST", mode["fast"])
    monkeypatch.setenv("RLK_CONSISTENCY", mode["consistency"])


@pytest.fixture(params=["argument", "environment"])
def started(request, tmp_path, monkeypatch):
    """init() in a mode given one way or the other."""

    def start(mode, **options):
        if request.param == "environment":
            environment(monkeypatch, mode)
        else:
            options["mode"] = mode
        given = {"spool": tmp_path / "spool", "run_id": "r", "shipper": "off", **options}
        return api.init(str(tmp_path / "ledger"), **given)

    return start


@pytest.mark.parametrize("mode", PAIRS, ids=ident)
def test_what_the_recorder_does_in_a_mode(started, tmp_path, mode):
    """Recording, diagnosis and admission follow consistency alone; fast is kept, told and recorded."""
    recorder = started(mode)
    held = api.mode()
    assert held.pair == mode
    reference = api.record("knob.applied", path="a", requested=1, status="applied")
    seen = diagnose(ROLLOUT, TRAINING)
    batch = [EMPTY_SAMPLE]
    admitted = admit(batch)
    if mode["consistency"] == "off":
        assert (recorder.enabled, reference.seq, seen.status, admitted.outcome) == (False, None, "off", "off")
        assert admitted.batch is batch
        assert not (tmp_path / "spool").exists()
        return
    assert reference.seq is not None
    assert seen.metrics["abs_dlogp_max"] == 0.25
    image = read_spool(recorder.directory)
    assert image.events[0].fields["mode"] == mode
    assert [e.type for e in image.events[3:]] == ["drift.diagnosed", "batch.admitted"]
    assert image.events[4].fields["mode"] == mode
    if mode["consistency"] == "audit":
        assert admitted.batch is batch
        assert admitted.outcome == "observed"
    else:
        assert admitted.batch == []
        assert admitted.outcome == "quarantined"


@pytest.mark.parametrize("mode", PAIRS, ids=ident)
def test_an_argument_wins_over_the_environment_for_each_half(tmp_path, monkeypatch, mode):
    for other in PAIRS:
        environment(monkeypatch, other)
        assert load_mode(mode).pair == mode
        assert load_mode({"fast": mode["fast"]}).pair == {**other, "fast": mode["fast"]}
        assert load_mode().pair == other


def test_the_defaults():
    assert load_mode() == Mode(fast="off", consistency="audit", on_missing="quarantine")


def test_on_missing_comes_from_the_call_the_argument_the_environment_in_this_order(opened, monkeypatch):
    monkeypatch.setenv("RLK_ON_MISSING", "downgrade")
    opened(mode={"consistency": "strict"})
    assert admit([EMPTY_SAMPLE]).outcome == "downgraded"
    opened(mode={"consistency": "strict"}, on_missing="fail")
    with pytest.raises(AdmissionError):
        admit([EMPTY_SAMPLE])
    assert admit([EMPTY_SAMPLE], on_missing="quarantine").outcome == "quarantined"


def test_a_second_init_does_not_inherit_the_mode_of_the_first(opened, monkeypatch):
    """What init() exports is for children; in this process the next init() sees what the user's environment says."""
    monkeypatch.setenv("RLK_FAST", "auto")
    opened(mode={"fast": "strict", "consistency": "strict"}, on_missing="fail")
    opened()
    assert api.mode() == Mode(fast="auto", consistency="audit", on_missing="quarantine")
    assert os.environ["RLK_FAST"] == "auto"


MALFORMED = [
    ({"mode": {"fast": "very"}}, {}, "mode fast 'very' is unknown"),
    ({"mode": {"consistency": "strickt"}}, {}, "did you mean 'strict'"),
    ({"mode": {"speed": "auto"}}, {}, "no key 'speed'"),
    ({"mode": "strict"}, {}, "mode must be a mapping"),
    ({"mode": {"fast": True}}, {}, "mode fast True"),
    ({"on_missing": "drop"}, {}, "on_missing 'drop' is unknown"),
    ({}, {"RLK_FAST": "yes"}, "mode fast 'yes'"),
    ({}, {"RLK_CONSISTENCY": "audti"}, "did you mean 'audit'"),
    ({}, {"RLK_ON_MISSING": "ignore"}, "on_missing 'ignore'"),
]


@pytest.mark.parametrize("ledger", [True, False], ids=["ledger", "none"])
@pytest.mark.parametrize(("options", "variables", "says"), MALFORMED)
def test_a_malformed_mode_is_one_config_error_with_and_without_a_ledger(
    tmp_path, monkeypatch, options, variables, says, ledger
):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=says) as caught:
        api.init(str(tmp_path / "ledger") if ledger else None, spool=tmp_path / "spool", **options)
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_a_malformed_mode_of_a_child_costs_production_one_warning(tmp_path, monkeypatch, caplog):
    monkeypatch.delenv("PYTEST_CURRENT_TEST")
    monkeypatch.setenv("RLK_FAST", "yes")
    assert api.record("knob.applied", path="a", requested=1, status="applied").seq is None
    assert admit([EMPTY_SAMPLE]).outcome == "off"
    assert [r.levelname for r in caplog.records] == ["WARNING"]


# -- off is native -----------------------------------------------------------------------------------------------------


def footprint(folder: Path):
    """Everything a recorder could leave behind: files, threads, descriptors, variables."""
    return {
        "files": sorted(str(p) for p in folder.rglob("*")),
        "threads": [t.name for t in threading.enumerate()],
        "descriptors": sorted(str(p.readlink()) for p in Path("/proc/self/fd").iterdir() if p.is_symlink()),
        "environment": dict(os.environ),
    }


def play(samples, rollout, training, mask):
    """What an instrumented step calls."""
    with scope(step=1):
        reference = api.record("logprobs", sample_id="s0", source="training", values=rollout[0], contract_id="c")
        seen = diagnose(rollout, training, mask=mask, sample_ids=["s0"])
        admitted = admit(samples, on_missing="fail")
    return reference, seen, admitted


@pytest.mark.parametrize("fast", FAST)
@pytest.mark.parametrize("how", ["variable", "argument", "disabled", "no ledger"])
def test_off_leaves_nothing_behind_and_touches_no_object(tmp_path, monkeypatch, fast, how):
    monkeypatch.setenv("RLK_SPOOL", str(tmp_path / "spool"))
    monkeypatch.setenv("RLK_FAST", fast)
    options = {}
    url = None if how == "no ledger" else str(tmp_path / "ledger")
    if how == "variable":
        monkeypatch.setenv("RLK_CONSISTENCY", "off")
    if how == "disabled":
        monkeypatch.setenv("RLK_DISABLE", "1")
    if how == "argument":
        options["mode"] = {"consistency": "off"}
    rng = np.random.default_rng(0)
    rollout = -rng.gamma(1, 1, (4, 32)).astype(np.float32)
    training, mask = rollout + np.float32(0.5), np.ones((4, 32), np.uint8)
    before_bytes = [a.tobytes() for a in (rollout, training, mask)]
    samples = [{"sample_id": "s0", "loss_mask": None}, object()]
    kept = list(samples)
    gc.collect()
    before = footprint(tmp_path)
    api.init(url, **options)
    reference, seen, admitted = play(samples, rollout, training, mask)
    assert footprint(tmp_path) == before
    assert (reference.seq, seen.status, admitted.outcome) == (None, "off", "off")
    assert admitted.batch is samples
    assert all(a is b for a, b in zip(samples, kept, strict=True))
    assert [a.tobytes() for a in (rollout, training, mask)] == before_bytes
    assert api.mode().pair == {"fast": fast, "consistency": "off"}


def test_off_by_argument_reaches_the_children_that_would_otherwise_record(tmp_path, monkeypatch):
    """The one variable off ever sets: without it a spawned child would record into the ledger of the environment."""
    monkeypatch.setenv("RLK_LEDGER", str(tmp_path / "ledger"))
    monkeypatch.setenv("RLK_RUN_ID", "r")
    before = dict(os.environ)
    api.init(mode={"consistency": "off"})
    assert dict(os.environ) == {**before, "RLK_CONSISTENCY": "off"}
    assert child_mode()["consistency"] == "off"
    api.close()
    assert dict(os.environ) == before


def test_strict_without_a_ledger_still_keeps_incomplete_samples_out(monkeypatch):
    """A demand is not dropped because nobody writes it down; audit without a ledger has nothing to do."""
    api.init(mode={"consistency": "strict"})
    assert admit([EMPTY_SAMPLE]).batch == []
    assert not api.current().enabled
    api.init(mode={"consistency": "audit"})
    assert api.mode().consistency == "off"


# -- children ----------------------------------------------------------------------------------------------------------

ASK = """
import json
from rlk_ledger_sdk.api import mode
print(json.dumps([mode().fast, mode().consistency, mode().on_missing]))
"""


def child_mode():
    done = subprocess.run([sys.executable, "-c", ASK], capture_output=True, text=True, check=True)
    return dict(zip(("fast", "consistency", "on_missing"), json.loads(done.stdout)))


@pytest.mark.parametrize("mode", [p for p in PAIRS if p["consistency"] != "off"], ids=ident)
def test_a_spawned_child_inherits_the_mode_given_as_an_argument(opened, mode):
    opened(mode=mode, on_missing="downgrade")
    assert child_mode() == {**mode, "on_missing": "downgrade"}
    api.close()
    assert child_mode() == {"fast": "off", "consistency": "off", "on_missing": "quarantine"}


JUDGE = """
import json
from rlk_ledger_sdk import api
from rlk_ledger_sdk.admission import admit
outcome = admit([{"sample_id": "s0", "response_token_ids": [1, 2], "loss_mask": [1, 1]}]).outcome
print(json.dumps([api.mode().pair, outcome, api.current().enabled]))
api.close(timeout=0)
"""


def forked():
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        outcome = admit([EMPTY_SAMPLE]).outcome
        os.write(write, json.dumps([api.mode().pair, outcome, api.current().enabled]).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        told = json.loads(pipe.read())
    assert os.waitpid(pid, 0)[1] == 0
    return told


def spawned():
    done = subprocess.run([sys.executable, "-c", JUDGE], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


@pytest.mark.parametrize("child", [forked, spawned])
@pytest.mark.parametrize("mode", PAIRS, ids=ident)
def test_children_of_both_kinds_judge_in_their_parents_mode(tmp_path, monkeypatch, mode, child):
    variables = {"RLK_LEDGER": str(tmp_path / "ledger"), "RLK_SPOOL": str(tmp_path / "spool"), "RLK_RUN_ID": "r"}
    for name, value in {**variables, "RLK_SHIPPER": "off"}.items():
        monkeypatch.setenv(name, value)
    api.init(mode=mode)
    expected = {"off": "off", "audit": "observed", "strict": "quarantined"}[mode["consistency"]]
    assert child() == [mode, expected, mode["consistency"] != "off"]
