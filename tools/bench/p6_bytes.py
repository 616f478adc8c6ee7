"""P6: bytes per token on disk, both sides' log-probabilities, ids and mask, beside other ways of keeping the same.

    python tools/bench/p6_bytes.py [--samples N] [--tokens N] [--json FILE]

The numbers are real: the shipped Qwen3 samples token by token with a KV cache in bf16 (rollout) and scores the same
tokens by one forward pass in bf16 (training). Its vocabulary has 272 entries, so ids compress better than those of a
large vocabulary; the log-probabilities do not know that. Sizes are of whole files, footers, receipts and the writers'
own events included.
"""

import argparse
import io
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from p5_shipper import ship_all
from random_qwen3 import SHIPPED
from transformers import AutoModelForCausalLM

from rlk_ledger_sdk.config import load_config
from rlk_ledger_sdk.recorder import Recorder

BATCH, PROMPT, TEMPERATURE = 32, 16, 0.7
BARS = {"raw arrays": 0.75, "JSON lines": 0.25, "torch.save": 0.8}
"""The most the ledger may take of each."""


def rolled_out(network: Any, prompts: torch.Tensor, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids [B, tokens], float32 log-probabilities [B, tokens]) sampled one token at a time."""
    out = network.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        do_sample=True,
        temperature=TEMPERATURE,
        top_k=0,
        min_new_tokens=tokens,
        max_new_tokens=tokens,
        pad_token_id=258,
        return_dict_in_generate=True,
        output_scores=True,
    )
    ids = out.sequences[:, PROMPT:]
    logprobs = torch.log_softmax(torch.stack(out.scores, 1).float(), dim=-1)
    return ids, logprobs.gather(2, ids[..., None])[..., 0]


def trained(network: Any, prompts: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Float32 log-probabilities [B, tokens] of `ids` by one forward pass."""
    logits = network(torch.cat([prompts, ids], 1)).logits[:, PROMPT - 1 : -1].float() / TEMPERATURE
    return torch.log_softmax(logits, dim=-1).gather(2, ids[..., None])[..., 0]


def made(samples: int, tokens: int) -> list[dict[str, np.ndarray]]:
    """Samples with `ids` (int32), `mask` (uint8), `rollout` and `training` (float32)."""
    torch.manual_seed(5)
    network = AutoModelForCausalLM.from_pretrained(SHIPPED, dtype=torch.bfloat16)
    out = []
    with torch.no_grad():
        for _ in range(0, samples, BATCH):
            prompts = torch.randint(0, 250, (BATCH, PROMPT))
            ids, rollout = rolled_out(network, prompts, tokens)
            training = trained(network, prompts, ids)
            for i in range(BATCH):
                mask = np.ones(tokens, np.uint8)
                mask[tokens // 3 : tokens // 2] = i % 4 != 0  # every fourth sample carries a tool's answer
                arrays = {"ids": ids[i].numpy().astype(np.int32), "mask": mask}
                out.append(arrays | {"rollout": rollout[i].numpy(), "training": training[i].numpy()})
    return out[:samples]


def in_a_ledger(samples: list[dict[str, np.ndarray]], folder: Path) -> int:
    """Bytes of the committed ledger."""
    url, spool = str(folder / "ledger"), folder / "spool"
    config = load_config(url, run_id="bench", role="rollout", spool=spool, shipper="off", on_error="raise")
    assert config is not None
    recorder = Recorder(config)
    for i, one in enumerate(samples):
        name, step = f"s{i}", i // 64
        recorder.record(
            "rollout.sample", step=step, sample_id=name, response_token_ids=one["ids"], loss_mask=one["mask"]
        )
        for side in ("rollout", "training"):
            recorder.record(
                "logprobs", step=step, sample_id=name, source=side, contract_id="c", values=one[side], dtype="float32"
            )
    recorder.close("bench", timeout=0.0)
    ship_all(spool)
    return sum(path.stat().st_size for path in Path(url).rglob("*") if path.is_file())


def as_json_lines(samples: list[dict[str, np.ndarray]]) -> int:
    """Bytes of one JSON object a sample, lists as text: what prime-rl style rollout files are."""
    lines = (json.dumps({"sample_id": f"s{i}", **{k: v.tolist() for k, v in s.items()}}) for i, s in enumerate(samples))
    return sum(len(line) + 1 for line in lines)


def by_torch_save(samples: list[dict[str, np.ndarray]]) -> int:
    """Bytes of one torch.save a step of 64 samples, each a dict of tensors."""
    total = 0
    for at in range(0, len(samples), 64):
        rows = [{name: torch.from_numpy(array) for name, array in s.items()} for s in samples[at : at + 64]]
        file = io.BytesIO()
        torch.save([{"sample_id": f"s{at + i}", **row} for i, row in enumerate(rows)], file)
        total += file.tell()
    return total


def main() -> None:
    """Prints the table and writes the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=384)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    samples = made(options.samples, options.tokens)
    tokens = sum(len(one["ids"]) for one in samples)
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        ours = in_a_ledger(samples, Path(folder)) / tokens
    raw = sum(array.nbytes for one in samples for array in one.values())
    others = {"raw arrays": raw, "JSON lines": as_json_lines(samples), "torch.save": by_torch_save(samples)}
    print(f"P6  {options.samples} samples of {options.tokens} tokens; the ledger takes {ours:.2f} bytes a token")
    for name, size in others.items():
        ratio = ours / size * tokens
        print(f"  {name:<12}{size / tokens:8.2f} bytes a token, the ledger {ratio:.2f}x of it (bar {BARS[name]}x)")
    if options.json:
        found = {name: size / tokens for name, size in others.items()}
        document = {"row": "P6", "tokens": tokens, "bytes_per_token": {"ledger": ours, **found}, "bars": BARS}
        options.json.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
