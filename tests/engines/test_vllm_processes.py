"""vLLM with engine core and workers in processes of their own: what they record, and what is left after a kill."""

import importlib.resources
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

import rlk_ledger

pytestmark = pytest.mark.engines

MODEL = Path(str(importlib.resources.files("rlk_ledger_replay") / "model"))
RUN = "killed"


@contextmanager
def job(folder: Path, *arguments: str) -> Iterator["subprocess.Popen[str]"]:
    """The job in a session of its own, its stdout to be read; everything of it is killed at the end."""
    environment = os.environ | {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "0|1" if arguments[2] == "2" else "0",
        "TORCH_COMPILE_DISABLE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "RLK_LEDGER": str(folder / "ledger"),
        "RLK_RUN_ID": RUN,
        "RLK_SPOOL": str(folder / "spool"),
        "RLK_SHIPPER": "off",
        "RLK_VLLM": "rollout-7" if arguments[0] == "async" else "0",
    }
    script = Path(__file__).with_name("vllm_job.py")
    with (
        (folder / "stderr").open("w") as errors,
        subprocess.Popen(
            [sys.executable, str(script), *arguments],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=environment,
            start_new_session=True,
        ) as process,
    ):
        try:
            yield process
        finally:
            kill_all(process)


def kill_all(process: "subprocess.Popen[str]") -> None:
    """SIGKILL to every process of the job at once."""
    if process.poll() is None:
        family = [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]
        os.killpg(process.pid, signal.SIGKILL)
        for member in family:
            if member.is_running():
                member.kill()
    process.wait()


def said(process: "subprocess.Popen[str]") -> Iterator[dict[str, Any]]:
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("{"):
            yield json.loads(line)


def recovered(folder: Path) -> Any:
    command = [sys.executable, "-m", "rlk_ledger", "recover", str(folder / "spool"), "--json"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return rlk_ledger.open(folder / "ledger")


def events(ledger: Any, *types: str) -> list[tuple[str, dict[str, Any], dict[str, Any]]]:
    return [(writer, e, a) for writer, _, e, a in ledger.read_events(RUN, types=list(types))]


def published() -> str:
    from safetensors.torch import load_file

    return rlk_ledger.state_digest(load_file(MODEL / "model.safetensors"))[0]


def test_two_tensor_ranks_and_a_killed_worker(tmp_path: Path) -> None:
    acknowledged: list[str] = []
    died = ""
    with job(tmp_path, "sync", str(MODEL), "2") as process:
        for line in said(process):
            acknowledged += line.get("recorded", [])
            died = died or line.get("died", "")
            if len(acknowledged) == 8:
                workers = [
                    child
                    for child in psutil.Process(process.pid).children(recursive=True)
                    if "Worker" in child.name() or "Worker" in " ".join(child.cmdline())
                ]
                workers[-1].kill()
            if "after" in acknowledged:
                break
        kill_all(process)
    ledger = recovered(tmp_path)
    found = {e["sample_id"] for _, e, _ in events(ledger, "rollout.sample")}
    assert died
    assert set(acknowledged) <= found
    assert {e["sample_id"] for _, e, _ in events(ledger, "logprobs")} >= set(acknowledged) - {"after"}
    ((_, load, _),) = events(ledger, "weights.loaded")
    assert (load["digest"], load["what"]) == (published(), "holds")
    ((_, collective, _),) = events(ledger, "collective.observed")
    assert (collective["group"], collective["group_size"]) == ("tp", 2)
    knobs = {e["path"]: e for _, e, _ in events(ledger, "knob.applied")}
    assert (knobs["parallel.tensor"]["requested"], knobs["parallel.tensor"]["actual"]) == (2, 2)
    assert (knobs["scheduler.max_num_batched_tokens"]["actual"], knobs["scheduler.chunked_prefill"]["actual"]) == (
        64,
        True,
    )


def test_an_engine_core_killed_alone_and_then_the_main_process(tmp_path: Path) -> None:
    """Neither kill costs what either process had recorded; vLLM's `generate` may wait for a killed core for ever."""
    acknowledged: list[str] = []
    core = None
    with job(tmp_path, "sync", str(MODEL), "1") as process:
        for line in said(process):  # to its end: what was said between the kills counts
            acknowledged += line["recorded"]
            if core is None and len(acknowledged) >= 8:
                children = psutil.Process(process.pid).children(recursive=True)
                (core,) = [child for child in children if "EngineCore" in " ".join(child.cmdline())]
                core.kill()
                core.wait()
                process.kill()
    assert core is not None
    ledger = recovered(tmp_path)
    pids = {writer: e.get("pid") for writer, e, _ in events(ledger, "writer.opened")}
    samples = {e["sample_id"]: pids[writer] for writer, e, _ in events(ledger, "rollout.sample")}
    assert set(acknowledged) <= set(samples)
    assert {e["sample_id"] for _, e, _ in events(ledger, "logprobs")} >= set(acknowledged)
    assert set(samples.values()) == {process.pid}
    batches = events(ledger, "batch.layout")
    assert {pids[writer] for writer, _, _ in batches} == {core.pid}
    assert {name for _, e, _ in batches for name in e["sample_order"]} >= set(acknowledged)


def test_an_async_engine_recorded_by_the_plugin_alone_and_killed_at_once_with_all_its_processes(
    tmp_path: Path,
) -> None:
    acknowledged: list[str] = []
    tokens: dict[str, list[int]] = {}
    with job(tmp_path, "async", str(MODEL), "1") as process:
        for line in said(process):
            assert "died" not in line, (tmp_path / "stderr").read_text()[-3000:]
            acknowledged += line["recorded"]
            tokens |= line["tokens"]
            if len(acknowledged) > 40:
                break
        kill_all(process)
    ledger = recovered(tmp_path)
    samples = {e["sample_id"]: (w, e, a) for w, e, a in events(ledger, "rollout.sample")}
    assert set(acknowledged) <= set(samples)
    assert all(samples[name][2]["response_token_ids"].tolist() == ids for name, ids in tokens.items())
    assert {e["engine"] for _, e, _ in samples.values()} == {"rollout-7"}
    knobs = {e["path"]: e for _, e, _ in events(ledger, "knob.applied")}
    assert knobs["scheduler.max_num_batched_tokens"]["requested"] == 64
    left = samples["left-0"][1]
    assert (left["status"], left["finish_reason"]) == ("aborted", "abort")
    spans = [samples[name][1]["weight_spans"][0]["version"] for name in ("r0-0-0", "r3-2-1")]
    assert spans == ["step-0", "step-1"]
    loads = {e["weight_version"]: e for _, e, _ in events(ledger, "weights.loaded")}
    assert (set(loads), loads["step-1"]["caches_flushed"]) == ({"step-0", "step-1"}, True)
    layouts = events(ledger, "batch.layout")
    front = samples["left-0"][0]
    assert {w for w, _, _ in layouts}.isdisjoint({front})  # recorded by the engine core itself
    assert {name for _, e, _ in layouts for name in e["sample_order"]} >= set(acknowledged)
