"""Claim: routes a rollout recorded are replayed in the reference; what they cover and where routers agree is told."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from rlk_ledger.build import build, event
from rlk_ledger_replay.decoder import Decoder
from rlk_ledger_replay.preparation import Request
from rlk_ledger_replay.run import replay
from rlk_ledger_schemas.fingerprints import contract_id, mask_digest, sha256, token_digest
from rlk_ledger_sdk.weights import state_digest

RUN, LAYERS, TOP_K = "r1", 2, 2
BODY = {"mode": "processed", "temperature": 1.0, "alignment": "token_i_given_before_i"}
MODEL = Qwen3MoeConfig(
    vocab_size=272,
    hidden_size=32,
    intermediate_size=48,
    moe_intermediate_size=32,
    num_experts=4,
    num_experts_per_tok=TOP_K,
    num_hidden_layers=LAYERS,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=16,
    max_position_embeddings=128,
    norm_topk_prob=True,
    initializer_range=0.3,
    tie_word_embeddings=False,
)


def records(folder: Path, cut: int) -> Iterator[Any]:
    """Four samples whose rollout took the reference's own routes but for one token; `cut` rows of each are missing."""
    torch.manual_seed(3)
    model = Qwen3MoeForCausalLM(MODEL)
    model.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["Qwen3MoeForCausalLM"]}))
    decoder = Decoder.load(folder)
    numbers = {"rollout": 0, "training": 0}

    def say(side: str, kind: str, /, **fields: Any) -> Any:
        numbers[side] += 1
        return event(RUN, side, numbers[side] - 1, kind, **fields)

    for side in numbers:
        yield say(side, "writer.opened", role=side, rank=0, world_size=1, engine={"name": side, "instance": side})
        yield say(side, "contract.declared", kind="logprob", version="1", body=BODY)
    digest = state_digest(dict(decoder.checkpoint.tensors))[0]
    count = len(decoder.checkpoint.tensors)
    yield say("training", "weights.published", weight_version="v0", digest=digest, tensor_count=count, path=str(folder))
    rng = np.random.default_rng(1)
    for index in range(4):
        prompt, response = [256, 5], rng.integers(0, 256, 12).tolist()
        ids = torch.tensor(prompt + response)
        own = decoder.prefill_routed([(ids, 2)])
        routes = own.chosen[0].clone()
        routes[6] = (routes[6] + 1) % 4
        taken = decoder.prefill_routed([(ids, 2)], [routes])
        flat = routes[: len(routes) - cut].to(torch.int32).numpy().reshape(-1)
        told = {"digest": sha256(flat.tobytes()), "layers": LAYERS, "top_k": TOP_K, "array": flat}
        told["coverage"] = (len(routes) - cut) / len(routes)
        mask = [1] * len(response)
        digests = {"token_digest": token_digest(response), "mask_digest": mask_digest(mask)}
        sample = {"sample_id": f"s{index}", "prompt_token_ids": prompt, "response_token_ids": response}
        spans = [{"version": "v0", "start": 0, "end": len(response)}]
        yield say(
            "rollout",
            "rollout.sample",
            **sample,
            loss_mask=mask,
            weight_spans=spans,
            engine="rollout",
            group_id=f"g{index}",
            routed_experts=told,
            **digests,
        )
        for side, scores in (("rollout", taken.scores[0]), ("training", own.scores[0])):
            named = {"source": side, "contract_id": contract_id("logprob", "1", BODY), "weight_version": "v0"}
            yield say(side, "logprobs", sample_id=f"s{index}", values=scores.numpy(), pass_id=side, **named, **digests)


def test_a_rollout_along_its_routes_is_what_it_recorded(tmp_path: Path) -> None:
    ledger = build(str(tmp_path / "l"), RUN, list(records(tmp_path / "m", 0)), roles={"rollout": 1, "training": 1})
    result = replay(ledger, RUN, request=Request(4), keep=False)
    assert result.scores is not None, result.decision.reason
    assert result.prepared.tokens is not None
    values = result.scores.values
    assert values["rollout.routed"].tobytes() == result.prepared.tokens.rollout_N.tobytes()
    assert values["rollout.prefill"].tobytes() == result.prepared.tokens.training_N.tobytes()
    told = result.numbers()["routes"]
    pairs = 4 * 13 * LAYERS
    assert (told["pairs"], told["covered"], told["coverage"]) == (pairs, pairs, 1.0)
    assert pairs - 4 * 13 <= told["agreeing"] <= pairs - 4
    assert {gate.gate: gate.status for gate in result.judgement.gates}["evidence.routes"] == "passed"


def test_incomplete_routes_are_a_gap_and_counted(tmp_path: Path) -> None:
    ledger = build(str(tmp_path / "l"), RUN, list(records(tmp_path / "m", 3)), roles={"rollout": 1, "training": 1})
    result = replay(ledger, RUN, request=Request(4), keep=False)
    told = result.numbers()["routes"]
    assert (told["pairs"], told["covered"]) == (4 * 13 * LAYERS, 4 * 10 * LAYERS)
    assert "routes.incomplete" in [finding.finding_id for finding in result.findings]
    assert {gate.gate: gate.status for gate in result.judgement.gates}["evidence.routes"] == "unknown"
