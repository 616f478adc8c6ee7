"""P10, operator by operator: time of the deterministic torch backend against plain torch on a CPU.

`linear` against torch.mm, `attention` against scaled_dot_product_attention, `linear_logprob` and `selected_logprob`
against (mm,) log_softmax and gather, `rms_norm`, `rope` and `swiglu` against the lines Hugging Face runs for them;
float32 and bfloat16 operands, shapes of a small Qwen3. Calls are interleaved and times are processor time, so that a
machine with other work on it changes both sides alike.

Usage: python tools/bench/p10_operators.py [--pairs N] [--threads N] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch.nn.functional import scaled_dot_product_attention, silu

from rlk_ledger_kernels.dtypes import DType, torch_dtype
from rlk_ledger_kernels.ops.attention.cache import KVCache
from rlk_ledger_kernels.ops.attention.plan import Chunk, plan_attention
from rlk_ledger_kernels.ops.attention.torch import attention
from rlk_ledger_kernels.ops.linear.torch import linear, pack_linear
from rlk_ledger_kernels.ops.linear_logprob.torch import linear_logprob, pack_head
from rlk_ledger_kernels.ops.rms_norm.torch import rms_norm
from rlk_ledger_kernels.ops.rope.table import frequencies, rope_table
from rlk_ledger_kernels.ops.rope.torch import rope
from rlk_ledger_kernels.ops.selected_logprob.torch import selected_logprob
from rlk_ledger_kernels.ops.swiglu.torch import swiglu
from rlk_ledger_replay.numerics import Numerics

BAR = 2.0
HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM, VOCABULARY, BATCH, LENGTH = 512, 1536, 8, 4, 64, 8192, 4, 256
ROWS = BATCH * LENGTH

Call = Callable[[], object]
Pair = tuple[str, Call, Call]


@dataclass(frozen=True)
class Row:
    """One comparison; medians of processor time in milliseconds, ratio of each pair's times."""

    operator: str
    shape: str
    dtype: str
    threads: int
    ours_ms: float
    torch_ms: float
    ratio: float


def linears(n: Numerics, dtype: torch.dtype) -> Iterator[Pair]:
    """Projections of a prefill, and of a decode step of 8 sequences."""
    for rows in (ROWS, 8):
        for k, outputs in ((HIDDEN, 2 * INNER), (INNER, HIDDEN)):
            x_NK, weight_OK = torch.randn(rows, k).to(dtype), torch.randn(outputs, k).to(dtype)
            packed = pack_linear(weight_OK, n.linear_contract())
            yield (
                f"linear|{rows} x {k} x {outputs}",
                lambda x=x_NK, p=packed: linear(x, p),
                lambda x=x_NK, w=weight_OK: torch.mm(x, w.T),
            )


def attentions(n: Numerics, dtype: torch.dtype) -> Iterator[Pair]:
    """A prefill of all sequences, and one decoded token of each after LENGTH - 1 others."""
    block = n.schedule.kv_block
    shape = f"{HEADS}/{KV_HEADS} heads x {HEAD_DIM}"
    q, k, v = (torch.randn(ROWS, heads, HEAD_DIM).to(dtype) for heads in (HEADS, KV_HEADS, KV_HEADS))
    q_BHTD, k_BHTD, v_BHTD = (x.view(BATCH, LENGTH, -1, HEAD_DIM).transpose(1, 2).contiguous() for x in (q, k, v))
    cache = KVCache(ROWS // block, KV_HEADS, block, HEAD_DIM, n.compute)
    pages = [range(i * LENGTH // block, (i + 1) * LENGTH // block) for i in range(BATCH)]
    whole = plan_attention([Chunk(0, LENGTH, page) for page in pages], n.schedule)
    cache.write(k, v, whole)
    contract = n.attention_contract(HEAD_DIM)
    yield (
        f"attention|prefill {BATCH} x {LENGTH}, {shape}",
        lambda: attention(q, cache, whole, contract),
        lambda: scaled_dot_product_attention(q_BHTD, k_BHTD, v_BHTD, is_causal=True, enable_gqa=True),
    )
    last = plan_attention([Chunk(LENGTH - 1, 1, page) for page in pages], n.schedule)
    one, one_BHTD = q[:BATCH], q_BHTD[:, :, :1].contiguous()
    yield (
        f"attention|decode {BATCH} x 1 after {LENGTH - 1}, {shape}",
        lambda: attention(one, cache, last, contract),
        lambda: scaled_dot_product_attention(one_BHTD, k_BHTD, v_BHTD, enable_gqa=True),
    )


def logprobs(n: Numerics, dtype: torch.dtype) -> Iterator[Pair]:
    """From hidden states, and from logits that exist."""
    hidden, weight = torch.randn(ROWS, HIDDEN).to(dtype), torch.randn(VOCABULARY, HIDDEN).mul(0.05).to(dtype)
    tokens_N = torch.randint(0, VOCABULARY, (ROWS,))
    head, logits = pack_head(weight, n.logprob_contract()), hidden @ weight.T

    def chosen(logits_NV: torch.Tensor) -> torch.Tensor:
        return torch.log_softmax(logits_NV.float(), -1).gather(1, tokens_N[:, None])

    shape = f"{ROWS} x {HIDDEN} x {VOCABULARY}"
    yield f"linear_logprob|{shape}", lambda: linear_logprob(hidden, head, tokens_N), lambda: chosen(hidden @ weight.T)
    yield (
        f"selected_logprob|{ROWS} x {VOCABULARY}",
        lambda: selected_logprob(logits, tokens_N, n.logprob_contract()),
        lambda: chosen(logits),
    )


def rows(n: Numerics, dtype: torch.dtype) -> Iterator[Pair]:
    """Norm, rotation and gate."""
    x, weight = torch.randn(ROWS, HIDDEN).to(dtype), torch.randn(HIDDEN).to(dtype)
    norm = n.rms_norm_contract(1e-6)

    def plain_norm() -> torch.Tensor:
        wide = x.float()
        return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(dtype)

    yield f"rms_norm|{ROWS} x {HIDDEN}", lambda: rms_norm(x, weight, norm), plain_norm
    q_NHD, half = torch.randn(ROWS, HEADS, HEAD_DIM).to(dtype), HEAD_DIM // 2
    table = rope_table(frequencies(HEAD_DIM, 1e4), LENGTH, n.rope_contract()).at(torch.arange(ROWS) % LENGTH)
    cos, sin = table.cos_PD[:, None], table.sin_PD.abs()[:, None]

    def plain_rope() -> torch.Tensor:
        return q_NHD * cos + torch.cat((-q_NHD[..., half:], q_NHD[..., :half]), -1) * sin

    yield f"rope|{ROWS} x {HEADS} x {HEAD_DIM}", lambda: rope(q_NHD, table, n.rope_contract()), plain_rope
    gate, up = torch.randn(ROWS, INNER).to(dtype), torch.randn(ROWS, INNER).to(dtype)
    yield f"swiglu|{ROWS} x {INNER}", lambda: swiglu(gate, up, n.swiglu_contract()), lambda: silu(gate) * up


def timed(call: Call) -> float:
    """Milliseconds of processor time of one call."""
    started = time.process_time()
    call()
    return (time.process_time() - started) * 1e3


def compare(pair: Pair, dtype: str, pairs: int) -> Row:
    """Medians over interleaved pairs, after one warm-up each."""
    name, ours, plain = pair
    ours(), plain()
    repeats = max(1, int(5.0 / max(timed(plain), 0.01)))
    times = [
        (timed(lambda: [ours() for _ in range(repeats)]), timed(lambda: [plain() for _ in range(repeats)]))
        for _ in range(pairs)
    ]
    ours_ms, torch_ms = (statistics.median(t[side] for t in times) / repeats for side in (0, 1))
    ratio = statistics.median(t[0] / t[1] for t in times)
    operator, shape = name.split("|")
    return Row(operator, shape, dtype, torch.get_num_threads(), round(ours_ms, 3), round(torch_ms, 3), round(ratio, 2))


def main() -> None:
    """Run all rows and print the table."""
    parser = argparse.ArgumentParser(description="P10: deterministic operators against plain torch on a CPU")
    parser.add_argument("--pairs", type=int, default=15, help="interleaved pairs per row (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="intra-op threads (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    found: list[Row] = []
    print("operator          dtype     shape                                      ours ms  torch ms  ratio")
    names: tuple[DType, ...] = ("float32", "bfloat16")
    for name in names:
        numerics = Numerics(compute=name)
        for family in (linears, attentions, logprobs, rows):
            for pair in family(numerics, torch_dtype(name)):
                row = compare(pair, name, args.pairs)
                found.append(row)
                print(
                    f"{row.operator:17} {row.dtype:9} {row.shape:42} {row.ours_ms:8.3f}  {row.torch_ms:8.3f}"
                    f"  {row.ratio:5.2f}",
                    flush=True,
                )
    above = [f"{row.operator} {row.dtype} {row.shape} {row.ratio}" for row in found if row.ratio > BAR]
    print(f"bar {BAR:.1f}: " + ("met by every row" if not above else f"missed by {len(above)}: " + "; ".join(above)))
    if args.json:
        args.json.write_text(json.dumps({"bar": BAR, "rows": [asdict(row) for row in found]}, indent=1) + "\n")


if __name__ == "__main__":
    main()
