"""Compiles a Triton kernel of each kind for an H100 and prints what the machine code holds, as JSON; needs no GPU.

Run by `test_hopper_kernels.py` in a process of its own, without TRITON_INTERPRET.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

from device_check.compiled import resources

from rlk_ledger_kernels.ops.embedding import triton as embedding
from rlk_ledger_kernels.ops.grouped_experts import triton as grouped_experts
from rlk_ledger_kernels.ops.linear import triton as linear
from rlk_ledger_kernels.ops.masked_mean import triton as masked_mean
from rlk_ledger_kernels.ops.moe_router import triton as moe_router
from rlk_ledger_kernels.ops.policy_terms import triton as policy_terms
from rlk_ledger_kernels.ops.policy_terms.contract import PolicyTermsContract
from rlk_ledger_kernels.ops.rms_norm import triton as rms_norm
from rlk_ledger_kernels.ops.rope import triton as rope
from rlk_ledger_kernels.ops.swiglu import triton as swiglu
from rlk_ledger_kernels.triton_language import row_tile, warps

HOPPER = GPUTarget("cuda", 90, 32)
DIVISIBLE = {"width", "token_stride", "head_stride", "gate_stride", "up_stride", "grad_stride", "table_stride"} | {
    *("N", "K", "stride_xm", "stride_we", "stride_wn", "stride_ym")
}
BF16 = tl.bfloat16
Facts = dict[str, int]


def compiled(
    kernel: Any, pointers: dict[str, str], constants: dict[str, Any], num_warps: int = 4, **options: Any
) -> Facts:
    """What one kernel's machine code holds. pointers: element type by argument; bfloat16 where none is named."""
    signature, attributes = {}, {}
    for at, name in enumerate(kernel.arg_names):
        pointer = name.endswith("_ptr")
        element = f"*{pointers.get(name, 'bf16')}" if pointer else "fp32" if name == "eps" else "i32"
        signature[name] = "constexpr" if name in constants else element
        if name not in constants and (pointer or name in DIVISIBLE):
            attributes[(at,)] = [["tt.divisibility", 16]]
    fixed = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = ASTSource(fn=kernel, signature=signature, constexprs=fixed, attrs=attributes)
    asked = {"num_warps": num_warps, "enable_fp_fusion": False, **options}
    done = triton.compile(source, target=HOPPER, options=asked)
    ptx = done.asm["ptx"]
    registers, stack = resources(done.asm["cubin"])
    return {
        "wide_loads": len(re.findall(r"ld\.global\S*\.v[24]", ptx)),
        "wide_stores": len(re.findall(r"st\.global\S*\.v[24]", ptx)),
        "contracted": len(re.findall(r"\bfma\.rn\.f32", ptx)),
        "atomics": len(re.findall(r"\b(?:atom|red)\.", ptx)),
        "tensor_cores": ptx.count("wgmma.mma_async"),
        "registers": registers,
        "stack": stack,
        "shared": done.metadata.shared,
    }


def of_rows() -> dict[str, Facts]:
    """The kernels that take rows, at a shape of Qwen3-8B."""
    found = {}
    rows, columns = row_tile(4096, 32768)
    norm = {"WIDTH": 4096, "COLUMNS": columns, "ADD": True, "NORMALISES_ROUNDED": True, "SUM": BF16}
    forward = {**norm, "ROWS": rows, "HF": True, "OUTPUT": BF16}
    found["rms_norm"] = compiled(rms_norm._forward_kernel, {}, forward, warps(rows, columns))
    tile = min(rows, 32)
    backward = {**norm, "TOKENS": 32, "TILE": tile, "GRAD_X": BF16}
    found["rms_norm_backward"] = compiled(
        rms_norm._backward_kernel, {"partial_ptr": "fp32"}, backward, warps(tile, columns)
    )
    turn = {"HEAD_DIM": 128, "TURNED": 128, "ROWS": 32, "PAIRS": 64, "REST": 1, "INVERSE": False}
    options = {**turn, "INTERLEAVED": True, "ARITHMETIC": tl.float32, "OUTPUT": BF16}
    found["rope"] = compiled(rope._rope_kernel, {"cos_ptr": "fp32", "sin_ptr": "fp32"}, options)
    gate = {"ROWS": 4, "COLUMNS": 1024, "QUOTIENT": True}
    found["swiglu"] = compiled(swiglu._forward_kernel, {}, {**gate, "ROUND_ACTIVATION": True, "OUTPUT": BF16})
    found["swiglu_backward"] = compiled(swiglu._backward_kernel, {}, {**gate, "GATE": BF16, "UP": BF16})
    level = {"order_ptr": "i64", "first_ptr": "i64", "length_ptr": "i64", "out_ptr": "fp32"}
    found["embedding_backward"] = compiled(
        embedding._level_kernel, level, {"NODES": 4, "COLUMNS": 1024, "CHILDREN": 32}
    )
    return found


def of_tokens() -> dict[str, Facts]:
    """The kernels that take one number to a token."""
    state = {"values_ptr": "i16", "mask_ptr": "i8", "state_ptr": "i64"}
    limbs = {"SPAN": 4096, "BLOCK": 128, "LIMBS": 32, "BITS": 8, "WIDTH": 36, "BRAIN": True}
    constants = policy_terms._constants(PolicyTermsContract())
    names = policy_terms._backward_kernel.arg_names
    wide = dict.fromkeys((n for n in names if n.endswith("_ptr")), "fp32") | {"grads_ptr": "fp64", "out_ptr": "fp64"}
    return {
        "masked_mean": compiled(masked_mean._limbs_kernel, state, limbs),
        "policy_terms_backward": compiled(policy_terms._backward_kernel, wide, {**constants, "GIVEN": 31}, 8),
    }


def of_products() -> dict[str, Facts]:
    """Products of bfloat16 along a tree of four leaves, and the router that chooses their experts."""
    tile = {"BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_K": 64, "GROUP": 8, "LEAF": 1024, "DEPTH": 2, "STEPS": 16}
    tree = {**tile, "EXACT": True, "FIXED": False, "REVERSED": False, "OUTPUT": BF16}
    wide = {"num_warps": 8, "num_stages": 4, "enable_fp_fusion": True}
    dense = {**tree, "stride_xk": 1, "stride_wk": 1, "HAS_BIAS": True}
    gathered = dict.fromkeys(("pairs_ptr", "tile_expert_ptr", "tile_first_ptr", "tile_end_ptr"), "i64")
    chosen = {"EXPERTS": 128, "TOP_K": 8, "GIVEN": False, "OF_TOP_K": False, "RENORMALISED": True}
    router = {**chosen, "PRECISION": tl.float32, "OUTPUT": BF16, "ROWS": 32, "COLUMNS": 128}
    return {
        "linear": compiled(linear.linear_kernel, {"bias_ptr": "fp32"}, dense, **wide),
        "grouped_experts": compiled(grouped_experts._grouped_kernel, gathered, tree, **wide),
        "moe_router": compiled(moe_router._router_kernel, {"experts_ptr": "i64"}, router),
    }


if __name__ == "__main__":
    print(json.dumps({"rows": of_rows(), "tokens": of_tokens(), "products": of_products()}))
