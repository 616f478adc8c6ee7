"""P13: deterministic matrix products against torch.mm, and attention forward against SDPA, at Qwen3-8B shapes.

Products sum K along the fixed tree and attention visits KV in logical blocks, so both cost more than kernels that may
choose their order by shape; the bars are 70 % of cuBLAS and 60 % of what torch's SDPA dispatches to. Beside the
products stands batch_invariant_ops, when it is installed.

Usage: python tools/bench/p13_gemm_attention.py (needs a CUDA device; `tools/device_check` runs it too)
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from device_check.clock import Clock
from device_check.report import Row, judged, line, unmeasured

from rlk_ledger_kernels.ops.attention.cache import KVCache
from rlk_ledger_kernels.ops.attention.contract import AttentionContract
from rlk_ledger_kernels.ops.attention.plan import Chunk, plan_attention
from rlk_ledger_kernels.ops.linear.contract import LinearContract
from rlk_ledger_kernels.schedule import Schedule

GEMM_BAR, ATTENTION_BAR = 0.70, 0.60

PRODUCTS = {
    "large": (
        ("qkv", 4096, 4096, 6144),
        ("o", 4096, 4096, 4096),
        ("gate and up", 4096, 4096, 24576),
        ("down", 4096, 12288, 4096),
        ("down, decode", 64, 12288, 4096),
    ),
    "small": (("qkv", 32, 64, 96),),
}
"""(name, rows N, K, outputs O) of a layer."""

LEAVES = {4096: (1024, 512), 12288: (2048,)}
"""k_leaf by K: trees of four and of eight leaves; the shards of eight ranks are whole nodes of those of eight."""

ATTENTION = {"large": ((32, 8, 128), ((2, 2048), (1, 8192))), "small": ((4, 2, 32), ((1, 80),))}
"""(query heads, kv heads, head dimension), then (sequences, tokens) of each row."""


def rows(clock: Clock, size: str = "large") -> Iterator[Row]:
    """One row for each product and each attention shape; a kernel that does not build is a row with its error."""
    for product in PRODUCTS[size]:
        yield from _product(clock, *product)
    shape, batches = ATTENTION[size]
    for sequences, tokens in batches:
        yield from _guarded(
            f"attention, {sequences} x {tokens} tokens, {shape[0]} over {shape[1]} heads of {shape[2]}",
            lambda name, many=sequences, long=tokens: _attention(clock, name, shape, many, long),
        )


def _product(clock: Clock, what: str, count: int, k: int, outputs: int) -> Iterator[Row]:
    generator = torch.Generator(clock.device).manual_seed(k)
    x_NK = torch.randn((count, k), device=clock.device, dtype=torch.bfloat16, generator=generator)
    weight_OK = torch.randn((outputs, k), device=clock.device, dtype=torch.bfloat16, generator=generator) * k**-0.5
    mm_ms = clock.median_ms(lambda: torch.mm(x_NK, weight_OK.T))
    about = f"{what}, {count} x {k} x {outputs} bfloat16"

    def triton(name: str, leaf: int) -> Row:
        backend = import_module("rlk_ledger_kernels.ops.linear.triton")
        contract = LinearContract(output="bfloat16", schedule=Schedule(k_leaf=leaf))
        packed = backend.pack_linear(weight_OK, contract)
        ms = clock.median_ms(lambda: backend.linear(x_NK, packed))
        detail = f"{2 * count * k * outputs / ms / 1e9:.0f} TFLOP/s, torch.mm {mm_ms:.3g} ms"
        more = {"value": ms, "unit": "ms", "against": "torch.mm", "detail": detail}
        return judged("P13", name, mm_ms / ms, GEMM_BAR, clock.timed, **more)

    def batch_invariant_ops(name: str) -> Row:
        product = import_module("batch_invariant_ops.batch_invariant_ops").matmul_persistent
        ms = clock.median_ms(lambda: product(x_NK, weight_OK.T))
        return Row(
            section="P13", name=name, state="measured", value=ms, unit="ms", against="torch.mm", ratio=mm_ms / ms
        )

    for leaf in LEAVES.get(k, (128,)):
        yield from _guarded(f"triton linear, {about}, leaf {leaf}", partial(triton, leaf=leaf))
    yield from _guarded(f"batch_invariant_ops, {about}", batch_invariant_ops)


def _attention(clock: Clock, name: str, shape: tuple[int, int, int], sequences: int, tokens: int) -> Row:
    heads, kv_heads, dim = shape
    generator = torch.Generator(clock.device).manual_seed(dim)
    q_NHD, k_NHD, v_NHD = (
        torch.randn((sequences * tokens, many, dim), device=clock.device, dtype=torch.bfloat16, generator=generator)
        for many in (heads, kv_heads, kv_heads)
    )
    q, k, v = (one.view(sequences, tokens, -1, dim).transpose(1, 2) for one in (q_NHD, k_NHD, v_NHD))
    sdpa_ms = clock.median_ms(
        lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    )
    backend = import_module("rlk_ledger_kernels.ops.attention.triton")
    contract = AttentionContract(scale=dim**-0.5, output="bfloat16", scale_at="score", weights="bfloat16")
    block = contract.schedule.kv_block
    pages = -(-tokens // block)
    chunks = [Chunk(0, tokens, range(one * pages, (one + 1) * pages)) for one in range(sequences)]
    plan = plan_attention(chunks, contract.schedule).to(clock.device)
    cache = KVCache(pages * sequences, kv_heads, block, dim, "bfloat16", device=clock.device, wide=False)
    cache.write(k_NHD, v_NHD, plan)
    ms = clock.median_ms(lambda: backend.attention(q_NHD, cache, plan, contract))
    detail = f"{2 * sequences * tokens**2 * heads * dim / ms / 1e9:.0f} TFLOP/s, SDPA {sdpa_ms:.3g} ms"
    return judged(
        "P13", name, sdpa_ms / ms, ATTENTION_BAR, clock.timed, value=ms, unit="ms", against="SDPA", detail=detail
    )


def _guarded(name: str, measure: Callable[[str], Row]) -> Iterator[Row]:
    """The row, or one that says why there is none."""
    try:
        yield measure(name)
    except Exception as problem:
        yield unmeasured("P13", name, problem)


def main() -> None:
    """Measure on the CUDA device, or say that there is none."""
    if not torch.cuda.is_available():
        print("P13 is not measured here: torch sees no CUDA device")
        return
    for row in rows(Clock("cuda")):
        print(line(row))


if __name__ == "__main__":
    main()
