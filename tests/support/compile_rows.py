"""Compiles every Triton kernel of the row operators for an H100 and prints what the machine code holds, as JSON.

Run by `test_row_compiled.py` in a process of its own, without TRITON_INTERPRET; needs no GPU.
"""

from __future__ import annotations

import json
import re
from typing import Any

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from rlk_ledger_kernels.ops.embedding import triton as embedding
from rlk_ledger_kernels.ops.masked_mean import triton as masked_mean
from rlk_ledger_kernels.ops.policy_terms import triton as policy_terms
from rlk_ledger_kernels.ops.policy_terms.contract import PolicyTermsContract
from rlk_ledger_kernels.ops.rms_norm import triton as rms_norm
from rlk_ledger_kernels.ops.rope import triton as rope
from rlk_ledger_kernels.ops.swiglu import triton as swiglu
from rlk_ledger_kernels.triton_language import row_tile, warps

HOPPER = GPUTarget("cuda", 90, 32)
DIVISIBLE = ("width", "token_stride", "head_stride", "gate_stride", "up_stride", "grad_stride", "table_stride")
BF16 = tl.bfloat16


def compiled(kernel: Any, pointers: dict[str, str], constants: dict[str, Any], num_warps: int = 4) -> dict[str, Any]:
    """What one kernel's PTX holds. pointers: element type by argument; bfloat16 where none is named."""
    signature, attributes = {}, {}
    for at, name in enumerate(kernel.arg_names):
        pointer = name.endswith("_ptr")
        element = f"*{pointers.get(name, 'bf16')}" if pointer else "fp32" if name == "eps" else "i32"
        signature[name] = "constexpr" if name in constants else element
        if pointer or name in DIVISIBLE:
            attributes[(at,)] = [["tt.divisibility", 16]]
    fixed = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = ASTSource(fn=kernel, signature=signature, constexprs=fixed, attrs=attributes)
    done = triton.compile(source, target=HOPPER, options={"num_warps": num_warps, "enable_fp_fusion": False})
    ptx = done.asm["ptx"]
    return {
        "machine_code": len(done.asm["cubin"]),
        "wide_loads": len(re.findall(r"ld\.global\S*\.v[24]", ptx)),
        "wide_stores": len(re.findall(r"st\.global\S*\.v[24]", ptx)),
        "contracted": len(re.findall(r"\bfma\.rn\.f32", ptx)),
        "atomics": len(re.findall(r"\b(?:atom|red)\.", ptx)),
        "shared": done.metadata.shared,
    }


def kernels() -> dict[str, dict[str, Any]]:
    """Every kernel at a shape of Qwen3-8B."""
    found: dict[str, dict[str, Any]] = {}
    for width in (128, 4096):
        rows, columns = row_tile(width, 32768)
        norm = {"WIDTH": width, "COLUMNS": columns, "ADD": True, "NORMALISES_ROUNDED": True, "SUM": BF16}
        forward = {**norm, "ROWS": rows, "HF": True, "OUTPUT": BF16}
        found[f"rms_norm {width}"] = compiled(rms_norm._forward_kernel, {}, forward, warps(rows, columns))
        tile = min(rows, 32)
        backward = {**norm, "TOKENS": 32, "TILE": tile, "GRAD_X": BF16}
        found[f"rms_norm_backward {width}"] = compiled(
            rms_norm._backward_kernel, {"partial_ptr": "fp32"}, backward, warps(tile, columns)
        )
    table = {"cos_ptr": "fp32", "sin_ptr": "fp32"}
    turn = {"HEAD_DIM": 128, "TURNED": 128, "ROWS": 32, "PAIRS": 64, "REST": 1, "INVERSE": False}
    for style in (False, True):
        options = {**turn, "INTERLEAVED": style, "ARITHMETIC": tl.float32, "OUTPUT": BF16}
        found[f"rope {'interleaved' if style else 'half'}"] = compiled(rope._rope_kernel, table, options)
    gate = {"ROWS": 4, "COLUMNS": 1024, "QUOTIENT": True}
    found["swiglu"] = compiled(swiglu._forward_kernel, {}, {**gate, "ROUND_ACTIVATION": True, "OUTPUT": BF16})
    found["swiglu_backward"] = compiled(swiglu._backward_kernel, {}, {**gate, "GATE": BF16, "UP": BF16})
    copied = {"ids_ptr": "i64", "table_ptr": "i16", "out_ptr": "i16"}
    found["embedding"] = compiled(embedding._gather_kernel, copied, {"ROWS": 4, "COLUMNS": 1024})
    level = {"order_ptr": "i64", "first_ptr": "i64", "length_ptr": "i64", "out_ptr": "fp32"}
    found["embedding_backward"] = compiled(
        embedding._level_kernel, level, {"NODES": 4, "COLUMNS": 1024, "CHILDREN": 32}
    )
    state = {"values_ptr": "i16", "mask_ptr": "i8", "state_ptr": "i64"}
    limbs = {"SPAN": 4096, "BLOCK": 128, "LIMBS": 32, "BITS": 8, "WIDTH": 36, "BRAIN": True}
    found["masked_mean"] = compiled(masked_mean._limbs_kernel, state, limbs)
    constants = policy_terms._constants(PolicyTermsContract())
    float32 = dict.fromkeys((n for n in policy_terms._forward_kernel.arg_names if n.endswith("_ptr")), "fp32")
    flags = {"clamped_ptr": "i8", "outside_ptr": "i8"}
    found["policy_terms"] = compiled(policy_terms._forward_kernel, {**float32, **flags}, constants, 8)
    wide = {**float32, "grads_ptr": "fp64", "out_ptr": "fp64"}
    found["policy_terms_backward"] = compiled(policy_terms._backward_kernel, wide, {**constants, "GIVEN": 31}, 8)
    return found


if __name__ == "__main__":
    print(json.dumps(kernels()))
