"""Claim: every Triton kernel of the row operators compiles to machine code of an H100 without a GPU, loads 16 or 8
bytes at a time at model shapes, and holds no contracted multiplication and no atomic: the contract rounds products, and
a sum has one writer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[1] / "support" / "compile_rows.py"
PER_TOKEN = ("masked_mean", "policy_terms", "policy_terms_backward")


def assembler() -> bool:
    """Whether the installed triton brings the assembler that compiles for a GPU."""
    spec = find_spec("triton")
    return spec is not None and (Path(str(spec.origin)).parent / "backends" / "nvidia" / "bin" / "ptxas").exists()


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))
    done = subprocess.run([sys.executable, str(SCRIPT)], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, dict[str, Any]] = json.loads(done.stdout)
    return found


@pytest.mark.skipif(not assembler(), reason="this build of triton brings no ptxas")
def test_every_kernel_compiles_for_hopper_with_wide_loads_and_without_contraction(
    kernels: dict[str, dict[str, Any]],
) -> None:
    assert len(kernels) == 13
    for name, code in kernels.items():
        assert code["machine_code"] > 1000, name
        assert code["atomics"] == 0, name
        assert code["contracted"] == 0, name
        if name not in PER_TOKEN:
            assert code["wide_loads"] >= 4, name
            assert code["wide_stores"] >= 4, name
        assert code["shared"] <= 48 * 1024, name
