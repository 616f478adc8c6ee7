"""A recorded run made of the shipped model: two bf16 engines that differ in the order of their sums, and faults."""

from __future__ import annotations

import inspect
import json
import shutil
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import rlk_ledger_replay
from rlk_ledger.build import build, event
from rlk_ledger.ledger import Ledger
from rlk_ledger_kernels.dtypes import DType
from rlk_ledger_kernels.probe import using_threads
from rlk_ledger_kernels.schedule import Schedule
from rlk_ledger_replay.decoder import Decoder
from rlk_ledger_replay.numerics import Numerics
from rlk_ledger_schemas.fingerprints import contract_id, mask_digest, token_digest
from rlk_ledger_sdk.weights import state_digest

MODEL = Path(rlk_ledger_replay.__path__[0]) / "model"
RUN = "r1"
VERSIONS = ("v0", "v1")
ENGINES = {
    "rollout": Schedule(k_leaf=64, kv_block=32, vocab_tile=48, k_order="descending"),
    "training": Schedule(k_leaf=96, kv_block=16, vocab_tile=272, kv_order="reverse"),
}


@dataclass
class Recipe:
    """How to make a run. What a side computes with may differ from what it declares: that is a fault."""

    groups: int = 10
    group_size: int = 2
    temperature: dict[str, float] = field(default_factory=lambda: {"rollout": 0.7, "training": 0.7})
    declared_temperature: dict[str, float] | None = None
    computes_version: dict[str, dict[str, str]] = field(default_factory=lambda: {"rollout": {}, "training": {}})
    shift: dict[str, int] = field(default_factory=lambda: {"rollout": 0, "training": 0})
    attention: dict[str, Any] | None = field(default_factory=lambda: {"mode": "causal", "output_dtype": "bfloat16"})
    compute: dict[str, DType] = field(default_factory=lambda: {"rollout": "bfloat16", "training": "bfloat16"})
    copy: bool = False
    wild: int = 0
    holds: bool = False
    publish_digest: str | None = None
    contract: dict[str, Any] = field(default_factory=dict)


@pytest.fixture(scope="session")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders v0 (the shipped model), v1 and v2 (small steps away, as an update leaves them)."""
    root = tmp_path_factory.mktemp("weights")
    tensors = load_file(MODEL / "model.safetensors")
    for number in range(3):
        folder = root / f"v{number}"
        folder.mkdir()
        shutil.copyfile(MODEL / "config.json", folder / "config.json")
        generator = torch.Generator().manual_seed(number)
        moved = {
            name: (t.float() * (1 + 0.03 * number * torch.randn(t.shape, generator=generator))).to(t.dtype)
            for name, t in tensors.items()
        }
        save_file(moved, folder / "model.safetensors")
    return root


@pytest.fixture
def make_run(tmp_path: Path, weights: Path) -> Callable[..., Ledger]:
    """Builds a ledger that holds a run: the clean recipe with some fields changed."""

    def make(**changes: Any) -> Ledger:
        records = list(_records(replace(Recipe(), **changes), weights))
        return build(str(tmp_path / "ledger"), RUN, records, roles={"rollout": 1, "training": 1})

    return make


def texts(count: int) -> list[tuple[list[int], list[int]]]:
    """(prompt, response) byte tokens cut from documentation every Python installation has."""
    prose = textwrap.dedent(inspect.getdoc(json) or "").encode() + (inspect.getdoc(inspect.signature) or "").encode()
    prose = prose * 4
    return [([256, *prose[31 * i : 31 * i + 24]], list(prose[31 * i + 24 : 31 * i + 72])) for i in range(count)]


def _scores(recipe: Recipe, side: str, weights: Path) -> dict[str, tuple[np.ndarray, ...]]:
    """What one engine computes for every text, by the version it claims."""
    count = recipe.groups * recipe.group_size
    used = {version: weights / recipe.computes_version[side].get(version, version) for version in VERSIONS}
    return {
        version: _computed(folder, side, recipe.compute[side], recipe.temperature[side], count)
        for version, folder in used.items()
    }


@cache
def _computed(folder: Path, side: str, compute: DType, temperature: float, count: int) -> tuple[np.ndarray, ...]:
    cut = [(prompt + response, len(prompt)) for prompt, response in texts(count)]
    numerics = Numerics(compute=compute, lm_head="float32", temperature=temperature, schedule=ENGINES[side])
    with using_threads(1):
        return tuple(values.numpy() for values in Decoder.load(folder, numerics).prefill_logprobs_batch(cut))


def _records(recipe: Recipe, weights: Path) -> Iterator[Any]:
    numbers = {"rollout": 0, "training": 0}

    def say(side: str, type_name: str, /, **fields: Any) -> Any:
        numbers[side] += 1
        return event(RUN, side, numbers[side] - 1, type_name, **fields)

    bodies = {}
    for side in ("rollout", "training"):
        yield say(
            side, "writer.opened", role=side, rank=0, world_size=1, engine={"name": side, "instance": f"{side}-0"}
        )
        if recipe.attention is not None:
            body = dict(recipe.attention, output_dtype=recipe.compute[side])
            yield say(side, "contract.declared", kind="attention", version="1", body=body)
        stated = recipe.declared_temperature or recipe.temperature
        bodies[side] = {
            "mode": "processed",
            "temperature": stated[side],
            "top_p": 1.0,
            "top_k": -1,
            "head_dtype": "float32",
            "logits_dtype": "float32",
            "alignment": "token_i_given_before_i",
            "execution_path": "decode" if side == "rollout" else "full_prefill",
            **recipe.contract,
        }
        yield say(side, "contract.declared", kind="logprob", version="1", body=bodies[side])
    for step, version in enumerate(VERSIONS):
        tensors = load_file(weights / version / "model.safetensors")
        digest = recipe.publish_digest or state_digest(tensors)[0]
        told = {"weight_version": version, "digest": digest, "tensor_count": len(tensors)}
        yield say("training", "weights.published", step=step, path=str(weights / version), **told)
        if recipe.holds:
            folder = weights / recipe.computes_version["rollout"].get(version, version)
            told["digest"] = state_digest(load_file(folder / "model.safetensors"))[0]
        what = "holds" if recipe.holds else "received"
        yield say("rollout", "weights.loaded", step=step, engine="rollout-0", what=what, **told)
    values = {side: _scores(recipe, side, weights) for side in ("rollout", "training")}
    if recipe.copy:
        values["training"] = {version: tuple(map(np.copy, rows)) for version, rows in values["rollout"].items()}
    for index in range(recipe.wild):
        values["training"][VERSIONS[index // recipe.group_size % 2]][index][5] -= 3.0
    for index, (prompt, response) in enumerate(texts(recipe.groups * recipe.group_size)):
        step = index // recipe.group_size % len(VERSIONS)
        version = VERSIONS[step]
        n = len(response)
        mask = [1] * n
        digests = {"token_digest": token_digest(response), "mask_digest": mask_digest(mask)}
        base = {"sample_id": f"s{index}", "step": step}
        yield say(
            "rollout",
            "rollout.sample",
            **base,
            group_id=f"g{index // recipe.group_size}",
            prompt_token_ids=prompt,
            response_token_ids=response,
            loss_mask=mask,
            weight_spans=[{"version": version, "start": 0, "end": n}],
            sampling={"temperature": recipe.temperature["rollout"]},
            engine="rollout-0",
            **digests,
        )
        for side in ("rollout", "training"):
            scored = np.roll(values[side][version][index], -recipe.shift[side])
            named = contract_id("logprob", "1", bodies[side])
            told = {
                "source": side,
                "values": scored,
                "contract_id": named,
                "weight_version": version,
                "dtype": "float32",
            }
            yield say(side, "logprobs", **base, **told, pass_id=side, **digests)
