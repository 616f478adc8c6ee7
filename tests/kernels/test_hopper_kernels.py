"""Claims about machine code for an H100, built without a GPU, one kernel of each kind. Row operators load 16 or 8 bytes
at a time at model shapes; no kernel of rows or tokens contracts a multiplication or has an atomic, for the contract
rounds products and a sum has one writer; products use tensor cores and keep four leaves in registers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "support" / "hopper_kernels.py"
Facts = dict[str, int]


def assembler() -> bool:
    """Whether the installed triton brings the assembler that compiles for a GPU."""
    spec = find_spec("triton")
    return spec is not None and (Path(str(spec.origin)).parent / "backends" / "nvidia" / "bin" / "ptxas").exists()


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Facts]]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))
    done = subprocess.run([sys.executable, str(SCRIPT)], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, dict[str, Facts]] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.skipif(not assembler(), reason="this build of triton brings no ptxas")
def test_kernels_for_hopper_hold_what_their_design_says(kernels: dict[str, dict[str, Facts]]) -> None:
    assert [len(kernels[kind]) for kind in ("rows", "tokens", "products")] == [6, 2, 3]
    for name, code in (kernels["rows"] | kernels["tokens"]).items():
        assert (code["atomics"], code["contracted"]) == (0, 0), name
        assert code["shared"] <= 48 * 1024, name
    for name, code in kernels["rows"].items():
        assert code["wide_loads"] >= 4, name
        assert code["wide_stores"] >= 4, name
    for name, code in kernels["products"].items():
        assert (code["tensor_cores"] > 0) is (name != "moe_router"), name
        assert code["shared"] <= 227 * 1024, name
        assert code["atomics"] == 0, name
    assert kernels["products"]["linear"]["stack"] == 0
    assert kernels["products"]["moe_router"]["stack"] == 0
