"""vLLM and Megatron-core at TP = 2 in one ledger: every variant gets the answer written down before the run."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from importlib import resources
from pathlib import Path
from typing import Any

import msgspec
import pytest
from store_servers import SeaweedFS

import rlk_ledger
from rlk_ledger.ledger import Ledger
from rlk_ledger.verify import verify
from rlk_ledger_replay.demo.exchange import step_file, take
from rlk_ledger_replay.preparation import Request
from rlk_ledger_replay.result import ReplayResult
from rlk_ledger_replay.run import replay
from rlk_ledger_replay.scorers.engines import Live, parse_scorers

pytestmark = [pytest.mark.engines, pytest.mark.timeout(900)]
HERE = Path(__file__).parent
EXPECTED: Mapping[str, Mapping[str, Any]] = json.loads((HERE / "expected.json").read_text())
SECONDS = 600.0
sys.path.insert(0, str(HERE))

from variants import GROUP_SIZE, GROUPS, STEPS, VARIANTS, Job  # noqa: E402

BY_NAME = {variant.name: variant for variant in VARIANTS}


@pytest.fixture(scope="module")
def bucket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a ledger on an S3 server of its own; its address and credentials are in the environment only."""
    with SeaweedFS(tmp_path_factory.mktemp("s3")) as server, pytest.MonkeyPatch.context() as patch:
        for name, value in server.environ.items():
            patch.setenv(name, value)
        yield server.url("end-to-end")


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory, bucket: str) -> Iterator[Job]:
    """All variants, run by one vLLM process and two Megatron ranks into one bucket."""
    root = tmp_path_factory.mktemp("end-to-end")
    made = Job(str(root), str(resources.files("rlk_ledger_replay") / "model"), bucket)
    made.untie()
    file = root / "job.json"
    file.write_bytes(msgspec.json.encode(made))
    commands = {
        "rollout": ["rollout.py", str(file)],
        "training-0": ["training.py", str(file), "0", str(root / "store")],
        "training-1": ["training.py", str(file), "1", str(root / "store")],
    }
    clean = {name: value for name, value in os.environ.items() if not name.startswith("RLK_")}
    environment = clean | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
    running = {}
    for name, (script, *arguments) in commands.items():
        with (root / f"{name}.log").open("wb") as log:
            running[name] = subprocess.Popen(
                [sys.executable, str(HERE / script), *arguments], stdout=log, stderr=log, env=environment
            )
    try:
        _wait(running, root)
        yield made
    finally:
        for process in running.values():
            process.kill()
            process.wait()


def _wait(running: Mapping[str, "subprocess.Popen[bytes]"], root: Path) -> None:
    """Until all processes ended well; fails with the log of the first that did not."""
    deadline = time.monotonic() + SECONDS
    while any(process.poll() is None for process in running.values()):
        failed = [name for name, process in running.items() if process.poll()]
        if failed or time.monotonic() > deadline:
            name = failed[0] if failed else "rollout"
            tail = (root / f"{name}.log").read_text(errors="replace")[-4000:]
            pytest.fail(f"{name} {'failed' if failed else 'did not end'}:\n{tail}")
        time.sleep(0.2)
    for name, process in running.items():
        assert process.returncode == 0, (root / f"{name}.log").read_text(errors="replace")[-4000:]


@pytest.fixture(scope="module")
def ledger(job: Job) -> Ledger:
    return rlk_ledger.open(job.ledger)


@pytest.fixture(scope="module")
def answers(ledger: Ledger) -> dict[str, ReplayResult]:
    """Each variant replayed by the reference decoder, all four arms; recorded in the ledger."""
    return {name: replay(ledger, name) for name in EXPECTED}


def test_every_variant_is_expected_to_answer_something() -> None:
    assert EXPECTED.keys() == BY_NAME.keys()


@pytest.mark.parametrize("name", EXPECTED)
def test_the_record_is_whole(ledger: Ledger, name: str) -> None:
    """Intact, except where a node was lost: then what is missing is named, and nothing looks like an attack."""
    checked = verify(ledger, name)
    missing = {"rank.missing"} if BY_NAME[name].lost_rank is not None else set()
    assert {one.kind for one in checked.findings if one.severity != "info"} == missing
    assert checked.exit_code == (3 if missing else 0)


def test_no_object_holds_a_credential(job: Job, ledger: Ledger) -> None:
    """They reached every process through the environment; nothing of it is recorded."""
    secrets = [os.environ[name].encode() for name in ("AWS_SECRET_ACCESS_KEY", "AWS_ACCESS_KEY_ID")]
    for entry in ledger.store.list(""):
        data = ledger.store.read(entry.path)
        assert not any(secret in data for secret in secrets), entry.path
    events = 0
    for name in EXPECTED:
        for record in ledger.run(name).records():  # segments are compressed: what they hold is looked at unpacked
            events += 1
            assert not any(secret in record.envelope for secret in secrets), (name, record.writer_id, record.seq)
    assert events > 1000


def test_every_sample_that_was_handed_over_is_recorded_with_both_sides_values(job: Job, ledger: Ledger) -> None:
    handed = {
        one.sample_id: (one.response, one.logprobs)
        for step in range(STEPS)
        for one in take(step_file(job.work(BY_NAME["clean"]), step), 1.0).samples
    }
    rows = ledger.sql(
        "select sample_id, list(token_id order by position) filter (source = 'rollout') as tokens, "
        "list(value order by position) filter (source = 'rollout') as rollout "
        "from tokens where run_id = 'clean' group by sample_id"
    ).fetchall()
    compared = dict(
        ledger.sql("select sample_id, count(dlogp) from drift where run_id = 'clean' group by sample_id").fetchall()
    )
    assert {row[0] for row in rows} == handed.keys()
    assert len(rows) == STEPS * GROUPS * GROUP_SIZE
    for sample_id, tokens, rollout in rows:
        assert tokens == handed[sample_id][0]
        assert compared[sample_id] == len(tokens)  # each has a training value of the same version beside it
        assert rollout == pytest.approx(handed[sample_id][1], rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("name", EXPECTED)
def test_a_variant_gets_the_answer_written_down(answers: dict[str, ReplayResult], name: str) -> None:
    expected, answer = EXPECTED[name], answers[name]
    found = {one.finding_id for one in answer.findings}
    told = f"{answer.judgement.decision.reason} {sorted(found)}"
    assert (answer.verdict, answer.exit_code) == (expected["verdict"], expected["exit_code"]), told
    assert set(expected["findings"]) <= found, told
    if "decision" in expected:
        assert answer.judgement.decision.decision in expected["decision"], told
    for finding_id, where in expected.get("where", {}).items():
        places = [one.where for one in answer.findings if one.finding_id == finding_id]
        assert any(where.items() <= place.items() for place in places), places


@pytest.mark.parametrize("name", [name for name in EXPECTED if "share_rollout" in EXPECTED[name]])
def test_the_rollouts_share_is_where_it_was_expected(answers: dict[str, ReplayResult], name: str) -> None:
    shares = answers[name].judgement.shares
    assert shares is not None
    assert shares.rollout is not None
    low, high = EXPECTED[name]["share_rollout"]
    assert low <= shares.rollout.value <= high, shares.rollout


def test_the_stale_head_of_a_tied_model_is_named_by_its_tensor(answers: dict[str, ReplayResult]) -> None:
    """A fault of the engine as it is: nothing was injected."""
    findings = [one for one in answers["tied-head"].findings if one.finding_id == "weights.differ"]
    assert [one.evidence["differing_tensors"] for one in findings] == [["lm_head.weight"]]


@pytest.fixture(scope="module")
def live(ledger: Ledger) -> dict[str, Any]:
    """One step of the clean run scored again by both engines, in bf16 and in float32; the document's numbers."""
    asked = Live(parse_scorers(["vllm", "megatron"]), float32=True)
    answer = replay(ledger, "clean", where="step = 1", request=Request(live=asked))
    assert (answer.verdict, answer.decision.decision) == ("pass", "within_floor"), answer.decision.reason
    return dict(answer.to_dict()["numbers"])


def test_both_engines_answered_on_every_path_and_no_guard_failed(live: dict[str, Any]) -> None:
    attempts = {(one["scorer"], one["role"]): one["status"] for one in live["live"]["attempts"]}
    assert set(attempts.values()) == {"completed"}
    assert {("vllm", "prefill"), ("vllm", "decode"), ("vllm", "float32"), ("megatron", "prefill")} <= attempts.keys()
    for scorer in live["live"]["scorers"].values():
        assert {guard["status"] for guard in scorer["guards"].values()} == {"passed"}


def test_each_engine_gives_its_recorded_values_again(live: dict[str, Any]) -> None:
    """Far inside its own noise floor; the chain then puts the drift between the engines, not between run and rerun."""
    for scorer in live["live"]["scorers"].values():
        assert scorer["reproduction_times_floor"]["high"] < 0.25
    chain = live["live"]["chain"]["vllm"]
    assert chain["megatron_over_prefill"]["part"]["low"] > 0.8
    total = sum(chain[link]["mean"] for link in chain if link != "training_over_rollout")
    assert total == pytest.approx(chain["training_over_rollout"]["mean"], abs=1e-6)


def test_shares_by_float32_runs_of_the_engines_are_the_references(live: dict[str, Any]) -> None:
    """Two float32 engines that share no code with the reference decoder put the drift where it does."""
    by_engines, by_reference = live["live"]["float32"]["share_rollout"], live["share_rollout"]
    assert by_reference["low"] <= by_engines["value"] <= by_reference["high"]
    assert by_engines["value"] == pytest.approx(by_reference["value"], abs=0.02)


def test_what_vllm_holds_is_what_was_published(ledger: Ledger) -> None:
    rows = ledger.sql(
        "select weight_version, count(distinct digest) from weights where run_id = 'clean' "
        "and weight_version like 'v%' group by 1 order by 1"
    ).fetchall()
    assert rows == [(f"v{version}", 1) for version in range(STEPS + 1)]
