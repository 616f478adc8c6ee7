"""The product kernels compile for Hopper on a machine without a GPU: tensor cores, no spill at four leaves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")
SCRIPT = Path(__file__).parents[1] / "support" / "hopper_compile.py"
TILE = {"BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_K": 64, "GROUP": 8}
TREE = {"LEAF": 1024, "DEPTH": 2, "STEPS": 16, "EXACT": True, "FIXED": False, "REVERSED": False}


def compiled(operator: str, kernel: str, **request: Any) -> dict[str, int]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    module = f"rlk_ledger_kernels.ops.{operator}.triton"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(SCRIPT), module, kernel, json.dumps(request)],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    built: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    return built


def test_the_linear_kernel_keeps_four_leaves_of_bfloat16_in_registers() -> None:
    pointers = {"x_ptr": "*bf16", "w_ptr": "*bf16", "bias_ptr": "*fp32", "y_ptr": "*bf16"}
    sizes = dict.fromkeys(("M", "N", "K", "stride_xm", "stride_wn", "stride_ym"), "i32")
    built = compiled(
        "linear",
        "linear_kernel",
        signature=pointers | sizes,
        constants={"stride_xk": 1, "stride_wk": 1, "HAS_BIAS": True, "OUTPUT": "tl.bfloat16", **TREE, **TILE},
        aligned=["N", "K", "stride_xm", "stride_wn", "stride_ym"],
        options={"num_warps": 8, "num_stages": 4, "enable_fp_fusion": True},
    )
    assert built["wgmma"] > 0
    assert built["shared"] <= 227 * 1024
    assert built.get("spilled", 0) == 0, built


def test_the_grouped_kernel_compiles_with_gathered_rows() -> None:
    pointers = {"x_ptr": "*bf16", "w_ptr": "*bf16", "y_ptr": "*bf16", "pairs_ptr": "*i64"}
    tiles = {"tile_expert_ptr": "*i64", "tile_first_ptr": "*i64", "tile_end_ptr": "*i64"}
    numbers = ("TILES", "X_DIVISOR", "N", "K", "stride_xm", "stride_we", "stride_wn", "stride_ym")
    built = compiled(
        "grouped_experts",
        "_grouped_kernel",
        signature=pointers | tiles | dict.fromkeys(numbers, "i32"),
        constants={"OUTPUT": "tl.bfloat16", **TREE, **TILE},
        aligned=["N", "K", "stride_xm", "stride_we", "stride_wn", "stride_ym"],
        options={"num_warps": 8, "num_stages": 4, "enable_fp_fusion": True},
    )
    assert built["wgmma"] > 0


def test_the_router_kernel_compiles() -> None:
    built = compiled(
        "moe_router",
        "_router_kernel",
        signature={"logits_ptr": "*bf16", "experts_ptr": "*i64", "weights_ptr": "*bf16", "rows": "i32"},
        constants={
            "EXPERTS": 128,
            "TOP_K": 8,
            "GIVEN": False,
            "OF_TOP_K": False,
            "RENORMALISED": True,
            "PRECISION": "tl.float32",
            "OUTPUT": "tl.bfloat16",
            "ROWS": 32,
            "COLUMNS": 128,
        },
        options={"num_warps": 4, "enable_fp_fusion": False},
    )
    assert built.get("spilled", 0) == 0, built
