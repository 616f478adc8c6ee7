"""Compile a Triton kernel for a Hopper GPU on a machine without one; run as a script, without the interpreter.

usage: python hopper_compile.py MODULE KERNEL JSON, JSON holding "signature" (argument -> type or "constexpr"),
"constants" (argument -> value; a dtype as "tl.bfloat16") and "options". Prints what the compiler made of it as JSON.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from importlib import import_module
from pathlib import Path


def main(module: str, kernel_name: str, asked: str) -> None:
    """Compile to PTX and count what matters: tensor-core products, shared memory."""
    import triton
    import triton.language as tl
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = getattr(import_module(module), kernel_name)
    request = json.loads(asked)
    names = list(kernel.arg_names)
    constants = {
        name: getattr(tl, value[3:]) if isinstance(value, str) and value.startswith("tl.") else value
        for name, value in request["constants"].items()
    }
    signature = {name: "constexpr" if name in constants else request["signature"][name] for name in names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if signature[n].startswith("*")}
    aligned |= {(names.index(n),): [["tt.divisibility", 16]] for n in request.get("aligned", ())}
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs=aligned,
    )
    built = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=request["options"])
    ptx = built.asm["ptx"]
    print(json.dumps({"wgmma": ptx.count("wgmma.mma_async"), "shared": built.metadata.shared, **_registers(ptx)}))


def _registers(ptx: str) -> dict[str, int]:
    """Bytes of spilled registers, by the assembler that comes with Triton."""
    import triton.backends.nvidia as nvidia

    folder = Path(nvidia.__file__).parent / "bin"
    with tempfile.TemporaryDirectory() as scratch:
        source = Path(scratch) / "kernel.ptx"
        source.write_text(ptx)
        for name in ("ptxas-blackwell", "ptxas"):
            if not (folder / name).exists():
                continue
            done = subprocess.run(
                [
                    str(folder / name),
                    "-v",
                    "--regAllocOptLevel=2",
                    "-arch",
                    "sm_90a",
                    str(source),
                    "-o",
                    f"{source}.cubin",
                ],
                capture_output=True,
                text=True,
                check=False,
            )
            if done.returncode == 0:
                words = done.stderr.replace(",", " ").split()
                at = words.index("spill")
                return {"spilled": int(words[at - 2]), "registers": int(words[words.index("registers") - 1])}
    return {}


if __name__ == "__main__":
    main(*sys.argv[1:])
