"""A real plugin on disk: a package that declares an operator, its backends, and the metadata that installs it."""

import itertools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rlk_ledger_kernels.registry import Registry

_COUNT = itertools.count()

DOUBLING = "def twice(x):\n    return x + x\n"


def backend(name: str, bucket: str, **fields: object) -> str:
    """The source of one Backend; `bucket` may be shortened to its first letter."""
    full = {"p": "contract_preserving", "o": "opportunistic", "r": "reference"}.get(bucket, bucket)
    given = {"devices": ("cpu",), "dtypes": ("float32",), "fallback": None, **fields}
    return f"Backend(name={name!r}, bucket={full!r}, {', '.join(f'{k}={v!r}' for k, v in given.items())})"


def declaration(name: str, *backends: str, surface: tuple[str, ...] = ("twice",)) -> str:
    """The source of an operator's `__init__`."""
    return (
        "from rlk_ledger_kernels.descriptors import Backend, Operator\n"
        f"OPERATOR = Operator(name={name!r}, package=__name__, chain=5, op_class='elementwise', "
        f"surface={surface!r}, backends=({''.join(one + ', ' for one in backends)}))\n"
    )


class Plugin:
    """A package of its own name in a folder of its own. package: its dotted name."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.package = f"rlk_plugin_{next(_COUNT)}"
        (folder / self.package).mkdir()

    def write(self, init: str, **modules: str) -> "Plugin":
        """The package's `__init__` and its modules, as source text."""
        for name, text in {"__init__": init, **modules}.items():
            (self.folder / self.package / f"{name}.py").write_text(text)
        return self

    def install(self, *, value: str = "", name: str = "offered") -> "Plugin":
        """Metadata as an installer leaves it, offering `value` (by default the package) to the registry."""
        metadata = self.folder / f"{self.package}-1.0.dist-info"
        metadata.mkdir(exist_ok=True)
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {self.package}\nVersion: 1.0\n")
        offered = f"[rlk_ledger.operators]\n{name} = {value or self.package}\n"
        (metadata / "entry_points.txt").write_text(offered)
        return self


@contextmanager
def plugin(folder: Path) -> Iterator[Plugin]:
    """A plugin whose folder is importable for as long as the block lasts; nothing of it stays loaded."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        made = Plugin(folder)
        yield made
        for name in [one for one in sys.modules if one.partition(".")[0] == made.package]:
            del sys.modules[name]


@contextmanager
def registered(folder: Path, *backends: str, name: str = "twice", **modules: str) -> Iterator[Registry]:
    """A registry that found one plugin operator with these backends; each module defaults to a right one."""
    with plugin(folder) as made:
        names = [one.split("'")[1] for one in backends]
        made.write(declaration(name, *backends), **{**dict.fromkeys(names, DOUBLING), **modules}).install()
        yield Registry()
