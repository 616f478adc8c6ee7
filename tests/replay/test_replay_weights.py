"""Claim: checkpoints are found by version or step, at paths and URLs, fetched whole or not at all, and a shard that is
missing, foreign or unlike its index is named before a number is computed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import fsspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from rlk_ledger.ledger import Ledger
from rlk_ledger_replay import fetch as fetch_module
from rlk_ledger_replay.checkpoint import CheckpointError
from rlk_ledger_replay.fetch import fetch
from rlk_ledger_replay.preparation import Request
from rlk_ledger_replay.run import replay
from rlk_ledger_replay.weights import Recorded, find_folder, hold
from rlk_ledger_schemas.errors import UsageError

RUN = "r1"
Make = Callable[..., Ledger]


@pytest.fixture
def bucket(weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """memory://w/v0 and v1 hold the checkpoints; the cache is the test's own."""
    monkeypatch.setenv("RLK_WEIGHTS_CACHE", str(tmp_path / "cache"))
    system = fsspec.filesystem("memory")
    for version in ("v0", "v1"):
        for file in (weights / version).iterdir():
            system.pipe_file(f"/w/{version}/{file.name}", file.read_bytes())
    yield "memory://w"
    system.rm("/w", recursive=True)


class Watching:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.stages: list[tuple[str, int | None]] = []
        self.done = 0

    def stage(self, name: str, total: int | None = None) -> None:
        self.stages.append((name, total))

    def advance(self, units: int) -> None:
        self.done += units


def sharded(folder: Path, target: Path) -> list[str]:
    """The checkpoint of `folder` in three shards with an index; returns the shards' names."""
    target.mkdir()
    shutil.copyfile(folder / "config.json", target / "config.json")
    tensors = load_file(folder / "model.safetensors")
    names = [f"model-{number:05}-of-00003.safetensors" for number in (1, 2, 3)]
    mapped = {name: names[index % 3] for index, name in enumerate(sorted(tensors))}
    for shard in names:
        save_file({name: tensors[name] for name, where in mapped.items() if where == shard}, target / shard)
    (target / "model.safetensors.index.json").write_text(json.dumps({"weight_map": mapped}))
    return names


def test_a_replay_finds_its_checkpoints_at_urls_and_says_what_the_one_on_disk_says(make_run: Make, bucket: str) -> None:
    ledger = make_run(groups=2)
    asked = Request(2, weights=bucket + "/{version}")
    result = replay(ledger, RUN, request=asked, keep=False)
    local = replay(ledger, RUN, request=replace(asked, weights=None), keep=False)
    assert result.scores is not None
    assert local.scores is not None
    for name, values in local.scores.values.items():
        assert values.tobytes() == result.scores.values[name].tobytes()
    wrong = replay(ledger, RUN, request=replace(asked, weights=bucket + "/v1?{version}"), keep=False)
    assert wrong.scores is None
    assert wrong.exit_code == 3


def test_a_template_may_name_the_step(tmp_path: Path, weights: Path) -> None:
    shutil.copytree(weights / "v1", tmp_path / "step_7")
    template = str(tmp_path / "step_{step}")
    assert find_folder(Recorded("v1", step=7), "ledger", template) == tmp_path / "step_7"
    with pytest.raises(UsageError, match="no step was recorded for version 'v1'"):
        find_folder(Recorded("v1"), "ledger", template)


def test_a_recorded_step_reaches_the_template(make_run: Make, weights: Path, tmp_path: Path) -> None:
    for step, version in enumerate(("v0", "v1")):
        shutil.copytree(weights / version, tmp_path / f"step_{step}")
    result = replay(make_run(groups=2), RUN, request=Request(2, weights=str(tmp_path / "step_{step}")), keep=False)
    assert result.scores is not None
    assert {gate.status for gate in result.judgement.gates if gate.gate.startswith("weights.digest")} == {"passed"}


def test_a_fetched_checkpoint_is_kept_and_fetched_again_when_either_end_changed(bucket: str, tmp_path: Path) -> None:
    first, again = Watching(), Watching()
    folder = fetch(f"{bucket}/v0", first)
    (stage,) = first.stages
    assert stage[1] == first.done == sum(f.stat().st_size for f in folder.iterdir() if f.name != "content.json")
    assert "MB" in stage[0]
    assert fetch(f"{bucket}/v0", again) == folder
    assert again.stages == []
    file = folder / "model.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    assert fetch(f"{bucket}/v0") == folder
    assert file.read_bytes() == data
    system = fsspec.filesystem("memory")
    system.pipe_file("/w/v0/model.safetensors", data + b"\0")
    assert fetch(f"{bucket}/v0") != folder


def test_a_fetch_that_breaks_off_leaves_nothing_that_is_used(
    bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = fetch_module._copied

    def breaking(system: object, one: object, target: Path, *rest: object) -> str:
        if target.name.endswith(".safetensors"):
            target.write_bytes(b"half")
            raise OSError("the connection was reset")
        return honest(system, one, target, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(fetch_module, "_copied", breaking)
    with pytest.raises(CheckpointError, match="the connection was reset"):
        fetch(f"{bucket}/v0")
    assert not list((tmp_path / "cache").iterdir())
    killed = tmp_path / "cache" / "0.part-killed"  # what kill -9 leaves
    killed.mkdir()
    monkeypatch.setattr(fetch_module, "_copied", honest)
    assert hold(Recorded("v0"), fetch(f"{bucket}/v0")).status == "unknown"


def test_a_file_that_came_short_is_refused(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    listed = fetch_module._listed
    monkeypatch.setattr(
        fetch_module, "_listed", lambda *given: [replace(one, size=one.size + 1) for one in listed(*given)]
    )
    with pytest.raises(CheckpointError, match=r"config\.json came to"):
        fetch(f"{bucket}/v0")


def test_a_url_without_a_model_is_named(bucket: str) -> None:
    with pytest.raises(CheckpointError, match=r"memory://w/v9: holds no config.json"):
        fetch(f"{bucket}/v9")


def test_shards_are_read_as_one_checkpoint_and_checked_against_their_index(weights: Path, tmp_path: Path) -> None:
    names = sharded(weights / "v0", tmp_path / "s")
    whole = hold(Recorded("v0"), weights / "v0")
    assert hold(Recorded("v0", whole.digest), tmp_path / "s").status == "passed"
    foreign = tmp_path / "s" / "model-00004-of-00004.safetensors"
    shutil.copyfile(tmp_path / "s" / names[0], foreign)
    with pytest.raises(CheckpointError, match=r"shard model-00004-of-00004\.safetensors is not in"):
        hold(Recorded("v0"), tmp_path / "s")
    foreign.unlink()
    shutil.copyfile(tmp_path / "s" / names[0], tmp_path / "kept")
    save_file({"other": torch.zeros(2)}, tmp_path / "s" / names[0])
    with pytest.raises(CheckpointError, match=f"shard {names[0]} lacks tensor"):
        hold(Recorded("v0"), tmp_path / "s")
    shutil.copyfile(tmp_path / "kept", tmp_path / "s" / names[0])
    (tmp_path / "s" / names[2]).unlink()
    with pytest.raises(CheckpointError, match=f"shard {names[2]} is missing"):
        hold(Recorded("v0"), tmp_path / "s")


def test_a_large_checkpoint_is_digested_without_holding_it(tmp_path: Path, weights: Path) -> None:
    def private() -> int:
        status = Path("/proc/self/smaps_rollup").read_text()
        return int(status.split("Anonymous:")[1].split()[0]) << 10

    tensors = load_file(weights / "v0" / "model.safetensors")
    config = json.loads((weights / "v0" / "config.json").read_text())
    rows = 300_000
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        if name in tensors:
            tensors[name] = torch.ones(rows, config["hidden_size"], dtype=torch.bfloat16)
    (tmp_path / "config.json").write_text(json.dumps({**config, "vocab_size": rows}))
    save_file(tensors, tmp_path / "model.safetensors")
    size = (tmp_path / "model.safetensors").stat().st_size
    del tensors
    hold(Recorded("v0"), weights / "v0")
    before = private()
    held = hold(Recorded("v0"), tmp_path)
    assert held.live.startswith("sum64x2:")
    assert size > 64 << 20
    assert private() - before < size / 4
