"""Train the small byte-level Qwen3 model that ships with the replay package.

Usage: python tools/train_model/train.py [--out DIR] [--steps N]
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import blake3
import torch
from safetensors.torch import save_file
from transformers import Qwen3Config, Qwen3ForCausalLM

sys.path.insert(0, str(Path(__file__).parent))
from corpus import BOS, EOS, PAD, VOCAB_SIZE, load_corpus

SHIPPED = Path(__file__).parents[2] / "replay" / "rlk_ledger_replay" / "model"


@dataclass(frozen=True)
class Settings:
    """Everything that determines the result on one build of torch, besides the corpus."""

    seed: int = 20240229
    threads: int = 2
    steps: int = 600
    batch: int = 12
    window: int = 512
    learning_rate: float = 6e-3
    warmup: int = 40
    weight_decay: float = 0.05
    clip_norm: float = 1.0


ARCHITECTURE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "hidden_act": "silu",
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "attention_bias": False,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "initializer_range": 0.05,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "pad_token_id": PAD,
}


def learning_rate(step: int, s: Settings) -> float:
    """Linear warm-up, then a cosine to a fiftieth."""
    if step < s.warmup:
        return s.learning_rate * (step + 1) / s.warmup
    phase = (step - s.warmup) / max(1, s.steps - s.warmup)
    return s.learning_rate * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * phase)))


def windows(tokens_N: torch.Tensor, s: Settings, generator: torch.Generator) -> torch.Tensor:
    """Draw a [batch, window] int64 tensor of windows at uniformly random offsets."""
    offsets_B = torch.randint(0, tokens_N.numel() - s.window, (s.batch,), generator=generator)
    return tokens_N[offsets_B[:, None] + torch.arange(s.window)]


def held_out_loss(model: Qwen3ForCausalLM, tokens_N: torch.Tensor, s: Settings) -> float:
    """Mean nats per byte over the held-out text in consecutive windows, the first token of each unscored."""
    usable = tokens_N.numel() // s.window * s.window
    with torch.no_grad():
        losses = [
            float(model(input_ids=batch_BT, labels=batch_BT).loss)
            for batch_BT in tokens_N[:usable].view(-1, s.window).split(16)
        ]
    return sum(losses) / len(losses)


def train(s: Settings) -> tuple[Qwen3ForCausalLM, dict[str, Any]]:
    """Train from scratch; returns the float32 model and the training log."""
    torch.set_num_threads(s.threads)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(s.seed)
    corpus = load_corpus()
    train_N = torch.tensor(corpus.train)
    held_out_N = torch.tensor(corpus.held_out)
    model = Qwen3ForCausalLM(Qwen3Config(**ARCHITECTURE)).float().train()
    decayed = [p for p in model.parameters() if p.dim() > 1]
    plain = [p for p in model.parameters() if p.dim() == 1]
    optimiser = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": s.weight_decay}, {"params": plain, "weight_decay": 0.0}],
        betas=(0.9, 0.98),
    )
    generator = torch.Generator().manual_seed(s.seed)
    curve: list[dict[str, float]] = []
    started = time.monotonic()
    for step in range(s.steps):
        for group in optimiser.param_groups:
            group["lr"] = learning_rate(step, s)
        batch_BT = windows(train_N, s, generator)
        loss = model(input_ids=batch_BT, labels=batch_BT).loss
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), s.clip_norm)
        optimiser.step()
        if step % 20 == 0 or step == s.steps - 1:
            curve.append({"step": step, "train_nats_per_byte": round(loss.item(), 5)})
            print(f"step {step:4d}  {loss.item():.4f} nats/byte  {time.monotonic() - started:.0f} s", flush=True)
    model.eval()
    model.to(torch.bfloat16).float()
    log = {
        "settings": asdict(s),
        "architecture": ARCHITECTURE,
        "parameters": sum(p.numel() for p in model.parameters()),
        "corpus": {"blake3": corpus.digest, "train_tokens": len(corpus.train), "held_out_tokens": len(corpus.held_out)},
        "python": platform.python_version(),
        "torch": torch.__version__,
        "seconds": round(time.monotonic() - started, 1),
        "held_out_nats_per_byte": round(held_out_loss(model, held_out_N, s), 5),
        "curve": curve,
    }
    return model, log


def save(model: Qwen3ForCausalLM, log: dict[str, Any], out: Path) -> None:
    """Write model.safetensors (bf16, Hugging Face names), config.json, training_log.json and DIGEST."""
    out.mkdir(parents=True, exist_ok=True)
    weights = {
        name: tensor.detach().to(torch.bfloat16).contiguous()
        for name, tensor in sorted(model.state_dict().items())
        if name != "lm_head.weight"  # tied to the embedding
    }
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    (out / "model.safetensors").chmod(0o644)
    config = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "torch_dtype": "bfloat16", **ARCHITECTURE}
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    (out / "training_log.json").write_text(json.dumps(log, indent=1) + "\n")
    lines = [
        f"{blake3.blake3((out / name).read_bytes()).hexdigest()}  {name}\n"
        for name in ("config.json", "model.safetensors", "training_log.json")
    ]
    (out / "DIGEST").write_text("".join(lines))


def main() -> None:
    """Train with the settings above and write the package data."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, default=SHIPPED, help="folder to write (default: the shipped model)")
    parser.add_argument("--steps", type=int, default=Settings.steps, help="optimiser steps (default: %(default)s)")
    args = parser.parse_args()
    model, log = train(Settings(steps=args.steps))
    save(model, log, args.out)
    print(f"{args.out}: {log['parameters']} parameters, {log['held_out_nats_per_byte']} nats/byte on held-out text")


if __name__ == "__main__":
    main()
