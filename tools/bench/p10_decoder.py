"""P10: time of the reference decoder against Hugging Face `forward` on the same tokens at equal batching.

Both score every token but the first of the same equally long sequences; Hugging Face runs forward, log_softmax and
gather. Pairs are interleaved and medians are compared, since both share a machine with whatever else runs there.

Usage: python tools/bench/p10_decoder.py [--pairs N] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from rlk_ledger_replay.decoder import Decoder
from rlk_ledger_replay.numerics import Numerics

BAR = 2.0
SHIPPED = Path(__file__).parents[2] / "replay" / "rlk_ledger_replay" / "model"
MIDDLE = {
    "vocab_size": 8192,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
}


@dataclass(frozen=True)
class Row:
    """One comparison; times are medians in milliseconds."""

    model: str
    dtype: str
    threads: int
    batch: int
    tokens: int
    ours_ms: float
    hf_ms: float
    ratio: float


def timed(call: Callable[[], object]) -> float:
    """Milliseconds of one call."""
    started = time.perf_counter()
    call()
    return (time.perf_counter() - started) * 1e3


def compare(name: str, model: Qwen3ForCausalLM, dtype: str, shape: tuple[int, int], pairs: int) -> Row:
    """Median times of both over interleaved pairs, after one warm-up each."""
    batch, length = shape
    ids_BT = torch.randint(0, model.config.vocab_size, (batch, length), generator=torch.Generator().manual_seed(0))
    raw = model.config.to_dict() | {"architectures": ["Qwen3ForCausalLM"]}
    decoder = Decoder.from_tensors(
        raw, model.state_dict(), Numerics(compute="bfloat16" if dtype == "bfloat16" else "float32")
    )
    samples = [(row_T, 1) for row_T in ids_BT]

    def hf() -> torch.Tensor:
        with torch.no_grad():
            logits_BTV = model(input_ids=ids_BT, use_cache=False).logits[:, :-1].float()
            return torch.log_softmax(logits_BTV, -1).gather(-1, ids_BT[:, 1:, None])

    def ours() -> list[torch.Tensor]:
        return decoder.prefill_logprobs_batch(samples)

    hf(), ours()
    times = [(timed(ours), timed(hf)) for _ in range(pairs)]
    ours_ms, hf_ms = statistics.median(t[0] for t in times), statistics.median(t[1] for t in times)
    ratio = statistics.median(t[0] / t[1] for t in times)
    return Row(name, dtype, torch.get_num_threads(), batch, length, round(ours_ms, 2), round(hf_ms, 2), round(ratio, 2))


def main() -> None:
    """Run all rows and print the table."""
    parser = argparse.ArgumentParser(description="P10: reference decoder against Hugging Face forward")
    parser.add_argument("--pairs", type=int, default=15, help="interleaved pairs per row (default: %(default)s)")
    parser.add_argument("--threads", type=int, nargs="*", default=[1, 2], help="thread counts (default: 1 2)")
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    args = parser.parse_args()
    rows: list[Row] = []
    print("model    dtype     threads  batch x tokens  ours ms   hf ms  ratio")
    for threads in args.threads:
        torch.set_num_threads(threads)
        for dtype in ("float32", "bfloat16"):
            torch.manual_seed(0)
            kind = getattr(torch, dtype)
            shipped = Qwen3ForCausalLM.from_pretrained(SHIPPED, dtype=kind).eval()
            middle = Qwen3ForCausalLM(Qwen3Config(**MIDDLE)).to(kind).eval()
            for name, model, shape in (
                ("shipped", shipped, (1, 256)),
                ("shipped", shipped, (8, 256)),
                ("shipped", shipped, (32, 128)),
                ("middle", middle, (4, 256)),
            ):
                row = compare(name, model, dtype, shape, args.pairs)
                rows.append(row)
                print(
                    f"{row.model:8} {row.dtype:9} {row.threads:7d}  {row.batch:5d} x {row.tokens:6d}"
                    f"  {row.ours_ms:7.1f} {row.hf_ms:7.1f}  {row.ratio:5.2f}",
                    flush=True,
                )
    worst = max(row.ratio for row in rows)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"worst ratio {worst:.2f}, bar {BAR:.1f}: {'met' if worst <= BAR else 'missed'}; peak memory {peak:.0f} MiB")
    if args.json:
        args.json.write_text(json.dumps({"bar": BAR, "rows": [asdict(row) for row in rows]}, indent=1) + "\n")


if __name__ == "__main__":
    main()
