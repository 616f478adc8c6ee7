"""vLLM's HTTP server records itself under RLK_VLLM: the job holds no line of the recorder's."""

import importlib.resources
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import rlk_ledger

pytestmark = [pytest.mark.engines, pytest.mark.timeout(400)]

MODEL = Path(str(importlib.resources.files("rlk_ledger_replay") / "model"))
RUN = "served"
SECONDS = 300.0


def free_port() -> int:
    with closing(socket.socket()) as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """The address of a server, and the folder of its ledger."""
    folder, port = tmp_path_factory.mktemp("served"), free_port()
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("RLK_", "PYTEST_"))} | {
        "TORCH_COMPILE_DISABLE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "RLK_LEDGER": str(folder / "ledger"),
        "RLK_RUN_ID": RUN,
        "RLK_SPOOL": str(folder / "spool"),
        "RLK_SHIPPER": "off",
        "RLK_VLLM": "rollout-7",
    }
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(MODEL)]
    command += ["--host", "127.0.0.1", "--port", str(port), "--enable-scale-out", "--skip-tokenizer-init"]
    command += ["--enforce-eager", "--dtype", "bfloat16", "--max-model-len", "512"]
    command += ["--logprobs-mode", "processed_logprobs"]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
    try:
        _until_healthy(process, f"http://127.0.0.1:{port}", folder / "log")
        yield f"http://127.0.0.1:{port}", folder
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _until_healthy(process: "subprocess.Popen[bytes]", address: str, log: Path) -> None:
    deadline = time.monotonic() + SECONDS
    while True:
        assert process.poll() is None, log.read_text(errors="replace")[-4000:]
        assert time.monotonic() < deadline, log.read_text(errors="replace")[-4000:]
        try:
            urllib.request.urlopen(f"{address}/health", timeout=2).read()
        except (urllib.error.URLError, OSError):
            time.sleep(0.3)
        else:
            return


def post(address: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(
        address + path, json.dumps(body).encode(), {"Content-Type": "application/json"}, method="POST"
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return dict(json.loads(answer.read()))
    except urllib.error.HTTPError as error:
        pytest.fail(f"{path}: {error.code} {error.read()[:2000]!r}")


def test_what_clients_got_is_what_the_ledger_holds(server: tuple[str, Path]) -> None:
    address, folder = server
    sampling = {"temperature": 0.7, "max_tokens": 12, "logprobs": 0, "seed": 5, "detokenize": False, "n": 1}
    answers = {
        name: post(
            address,
            "/inference/v1/generate",
            {"request_id": name, "token_ids": [256, 100 + i, 101, 102], "sampling_params": sampling},
        )
        for i, name in enumerate(("a", "b"))
    }
    command = [sys.executable, "-m", "rlk_ledger", "recover", str(folder / "spool"), "--json"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode in (0, 3), done.stdout + done.stderr  # 3: the server is alive and goes on recording
    rows = [(e, a) for _, _, e, a in rlk_ledger.open(folder / "ledger").read_events(RUN)]
    samples = {str(a["response_token_ids"].tolist()): e for e, a in rows if e["type"] == "rollout.sample"}
    values = {e["sample_id"]: a["values"].tolist() for e, a in rows if e["type"] == "logprobs"}
    for answer in answers.values():
        (choice,) = answer["choices"]
        sample = samples[str(choice["token_ids"])]
        assert (sample["engine"], sample["finish_reason"]) == ("rollout-7", choice["finish_reason"])
        told = [token["logprob"] for token in choice["logprobs"]["content"]]
        assert values[sample["sample_id"]] == pytest.approx(told, rel=1e-6)
        assert (sample["sampling"]["temperature"], sample["sampling"]["seed"]) == (0.7, 5)
    assert len(values) == len(samples) == len(answers)
    (contract,) = [e["body"] for e, _ in rows if e["type"] == "contract.declared" and e["kind"] == "logprob"]
    assert (contract["mode"], contract["temperature"], contract["compute_dtype"]) == ("processed", 0.7, "bfloat16")
    # nobody named a version: none is invented, for the samples or for what the workers hold
    assert {sample["metadata_source"]["weight_spans"] for sample in samples.values()} == {"absent"}
    assert [e for e, _ in rows if e["type"] == "weights.loaded"] == []
