"""Kernels built for a card that is not here: Triton compiles them to machine code and nothing is launched.

What comes out is what the card would load, so that a kernel Triton or ptxas refuses, or one that needs more shared
memory than the card has, is found without the card. What it computes is not: results of such a run mean nothing.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

SHARED_BYTES = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10}
"""Shared memory one block may use, by compute capability (CUDA programming guide, technical specifications)."""


class _NoCard:
    """What Triton asks of a driver before it launches, answered for a card that is not here."""

    def __init__(self, capability: int) -> None:
        self._target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        """The card to compile for."""
        return self._target

    def get_current_device(self) -> int:
        """The only one."""
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        """None is needed: nothing is launched."""
        return 0

    def get_active_torch_device(self) -> torch.device:
        """Where the operands are."""
        return torch.device("cpu")


class Compiling:
    """While installed, a launch compiles. Owns what was compiled since it was last asked; one to a process."""

    def __init__(self, capability: int) -> None:
        """capability: of the card, such as 90 for Hopper. Raises ValueError for one without a known limit."""
        if capability not in SHARED_BYTES:
            raise ValueError(f"capability {capability} is not known; choose one of {sorted(SHARED_BYTES)}")
        self._limit = SHARED_BYTES[capability]
        self._kernels: dict[bytes, tuple[str, int]] = {}
        self._launches = 0
        real = JITFunction.run

        def compile_only(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
            built = real(kernel, *args, grid=grid, warmup=True, **options)
            self._launches += 1
            self._kernels[built.asm["cubin"]] = (str(built.metadata.name), int(built.metadata.shared))
            return built

        driver.set_active(_NoCard(capability))
        JITFunction.run = compile_only

    def taken(self) -> tuple[str | None, str]:
        """(what the card could not load, or None; what was built since the last call, in words)."""
        kernels, launches = list(self._kernels.items()), self._launches
        self._kernels, self._launches = {}, 0
        if not launches:
            return "no kernel was launched", ""
        told, objection = [], None
        for cubin, (name, shared) in kernels:
            if shared > self._limit:
                objection = f"{name} needs {shared} bytes of shared memory, the card has {self._limit}"
            registers, stack = resources(cubin)
            told.append(f"{name} {registers} registers, {stack} B of stack, {shared} B shared")
        return objection, f"{launches} launches: {'; '.join(told)}"


def resources(cubin: bytes) -> tuple[int, int]:
    """(registers to a thread, bytes of stack, which is where spilled registers go), as cuobjdump reads them."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), "--dump-resource-usage", file.name]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = re.search(r"REG:(\d+) STACK:(\d+)", done.stdout)
    if found is None:
        raise RuntimeError(f"cuobjdump did not tell the resources of a kernel: {done.stdout.strip()[:200]}")
    return int(found[1]), int(found[2])
