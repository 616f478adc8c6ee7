"""Plugins: real installed metadata, found by entry point; a broken one is one refused entry and nothing else."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from plugin_folder import DOUBLING, Plugin, backend, declaration, plugin

from rlk_ledger_kernels import ops
from rlk_ledger_kernels.registry import Registry, Request, default, load, operators, resolve
from rlk_ledger_kernels.suite import catalogue, invariance

FULL = {"device": "cpu", "dtype": "float32", "autograd": "forward", "parallel": ("single",), "contract_version": "1"}
GOOD = declaration("twice", backend("torch", "p"))


@pytest.mark.parametrize("value", ["{package}", "{package}:OPERATOR"], ids=["module", "object"])
def test_an_entry_point_names_a_module_or_its_operator(tmp_path: Path, value: str) -> None:
    with plugin(tmp_path) as made:
        made.write(GOOD, torch=DOUBLING).install(value=value.format(package=made.package))
        found = Registry()
        assert found.rejected == ()
        decision = found.resolve(Request(operator="twice", **FULL))
        assert decision.implementation == f"{made.package}.torch"
        assert load(decision, found).twice(21) == 42


BROKEN = {
    "raises": ("raise RuntimeError('no licence')\n", "", "RuntimeError: no licence"),
    "exits": ("raise SystemExit(3)\n", "", "SystemExit: 3"),
    "does not parse": ("def\n", "", "SyntaxError"),
    "declares nothing": ("X = 1\n", "", "AttributeError"),
    "is no operator": ("OPERATOR = 3\n", "", "OPERATOR is a int, not an Operator"),
    "is not there": (GOOD, "no_such_module_anywhere", "ModuleNotFoundError"),
    "lacks its backend": (declaration("twice", backend("gone", "p")), "", "has no file"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_plugin_is_one_refused_entry(tmp_path: Path, kind: str) -> None:
    init, value, reason = BROKEN[kind]
    with plugin(tmp_path) as made:
        made.write(init, torch=DOUBLING).install(value=value)
        found = Registry()
    (entry,) = found.rejected
    assert entry.code == "declaration_broken"
    assert reason in entry.reason
    assert entry.backend.startswith("offered = ")
    assert set(found.operators) == set(operators()), "the operators that ship are untouched"


def test_a_plugin_cannot_take_the_name_of_an_operator_that_ships(tmp_path: Path) -> None:
    with plugin(tmp_path) as made:
        made.write(declaration("linear", backend("torch", "p")), torch=DOUBLING).install()
        found = Registry()
    (entry,) = found.rejected
    assert "names an operator that exists already" in entry.reason
    assert found.operators["linear"].package == "rlk_ledger_kernels.ops.linear"


def test_two_plugins_of_one_name_are_both_refused(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    with plugin(tmp_path / "a") as one, plugin(tmp_path / "b") as other:
        for made in (one, other):
            made.write(GOOD, torch=DOUBLING).install()
        found = Registry()
    assert "twice" not in found.operators
    assert [entry.reason for entry in found.rejected] == ["operator 'twice' is declared 2 times"] * 2


@pytest.fixture
def looked_around() -> Iterator[Registry]:
    """The registry of this process, which looks around again when the test is over."""
    yield default()
    default().refresh()


def test_adding_an_operator_is_adding_one_folder(tmp_path: Path, looked_around: Registry) -> None:
    """A copy of a folder under another name is found, resolved and listed with its cases; no other file changes."""
    with plugin(tmp_path) as made:
        _copied_operator(made, "swiglu", "doubled")
        made.install()
        looked_around.refresh()
        operator = operators()["doubled"]
        decision = resolve("doubled", "torch")
        module = load(decision)
        assert decision.implementation == f"{made.package}.torch"
        assert all(callable(getattr(module, name)) for name in operator.surface)
        assert catalogue.operators()["doubled"] == operator
        again, first = (catalogue.cases(one) for one in (operator, operators()["swiglu"]))
        assert [case.name for case in again] == [case.name for case in first] != []
        assert invariance.check(again[0], module) is None
    looked_around.refresh()
    assert "doubled" not in operators()


def _copied_operator(made: Plugin, original: str, name: str) -> None:
    """The folder of an operator that ships, under a package and a name of its own."""
    target = made.folder / made.package
    shutil.rmtree(target)
    shutil.copytree(Path(ops.__path__[0]) / original, target, ignore=shutil.ignore_patterns("__pycache__"))
    for path in target.glob("*.py"):
        text = path.read_text().replace(f"rlk_ledger_kernels.ops.{original}", made.package)
        path.write_text(text.replace(f'name="{original}"', f'name="{name}"') if path.name == "__init__.py" else text)
