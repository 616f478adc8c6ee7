"""The registry: what it finds, what it matches, and that it fails closed."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch
from plugin_folder import DOUBLING, backend, declaration, plugin, registered

from rlk_ledger_kernels import ops, registry
from rlk_ledger_kernels.descriptors import Backend
from rlk_ledger_kernels.discovery import objection_to
from rlk_ledger_kernels.errors import ContractError, DecisionError
from rlk_ledger_kernels.fingerprint import build_facts, build_fingerprint, source_fingerprint
from rlk_ledger_kernels.registry import Decision, Registry, Request, load, operators, resolve
from rlk_ledger_kernels.request import objection

FULL = {"device": "cpu", "dtype": "float32", "autograd": "forward", "parallel": ("single",), "contract_version": "1"}
ONE = Backend(name="one", bucket="contract_preserving", devices=("cpu",), dtypes=("float32",))
WIDE = msgspec.structs.replace(
    ONE,
    parallel=("single", "tp", "cp"),
    requires=("tp", "cp"),
    shapes=(("head_dim", 16, 256), ("tp", 1, 8), ("hidden", 1, None)),
)
SHAPES = {"head_dim": 64, "tp": 1, "hidden": 4096}

SIZES = {dim: low for one in operators().values() for it in one.backends for dim, low, _ in it.shapes}
"""A size that every declared range of every operator begins with."""


def request(**fields: object) -> Request:
    return Request(operator="any", **{**FULL, **fields})


# -- the operators that ship -------------------------------------------------------------------------------------------


def test_every_folder_is_an_operator_and_none_is_refused() -> None:
    folders = {path.name for path in Path(ops.__path__[0]).iterdir() if (path / "__init__.py").is_file()}
    found = Registry()
    assert found.rejected == ()
    assert folders <= set(found.operators)
    assert [one.chain for one in found.operators.values()] == sorted(one.chain for one in found.operators.values())


def test_every_operator_resolves_to_the_modules_that_hold_its_surface() -> None:
    for operator in operators().values():
        for requested in ("auto", "torch", "reference"):
            decision = resolve(operator.name, requested, shapes=SIZES)
            assert decision.actual == ("torch" if requested == "auto" else requested)
            module = load(decision)
            assert [name for name in operator.surface if not callable(getattr(module, name, None))] == []


def test_nothing_is_imported_to_decide() -> None:
    """A process that resolved every operator has loaded no backend, no Triton and no engine."""
    code = (
        "import sys, json\n"
        "from rlk_ledger_kernels.registry import operators, resolve\n"
        f"made = [resolve(name, 'reference', shapes={SIZES!r}).implementation for name in operators()]\n"
        "made += [f'{one.package}.{b.name}' for one in operators().values() for b in one.backends]\n"
        "print(json.dumps([n for n in [*made, 'triton', 'vllm', 'flashinfer'] if n in sys.modules]))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == []


def test_the_interpreter_is_never_chosen_by_auto(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert {resolve(name, shapes=SIZES).actual for name in operators()} == {"torch"}


def test_triton_is_taken_by_name_where_its_interpreter_is_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    with registered(tmp_path, backend("triton", "p", needs=("triton",)), backend("torch", "p")) as found:
        monkeypatch.setenv("TRITON_INTERPRET", "1")
        assert found.resolve(Request(operator="twice", backend="triton", **FULL)).actual == "triton"
        assert found.resolve(Request(operator="twice", **FULL)).actual == "torch"
        monkeypatch.setenv("TRITON_INTERPRET", "0")
        with pytest.raises(DecisionError, match="Triton has no CPU backend") as caught:
            found.resolve(Request(operator="twice", backend="triton", **FULL))
    assert caught.value.code == "backend_unavailable"
    assert "set TRITON_INTERPRET=1" in (caught.value.rejected[0].enable or "")


def test_a_device_that_is_not_there_is_a_reason_and_no_crash(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    asked = Request(operator="twice", backend="torch", **{**FULL, "device": "cuda"})
    declared = backend("torch", "p", devices=("cuda",), enable="a GPU")
    with registered(tmp_path, declared) as found, pytest.raises(DecisionError, match="sees no cuda device") as caught:
        found.resolve(asked)
    assert (caught.value.code, caught.value.rejected[0].enable) == ("backend_unavailable", "a GPU")


# -- matching ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("field", FULL)
def test_a_field_that_is_not_stated_matches_nothing(field: str) -> None:
    found = objection(ONE, request(**{field: None}))
    assert found is not None
    assert found.code == "required_field_missing"
    assert field in found.reason


@pytest.mark.parametrize("field", FULL)
def test_only_an_explicit_wildcard_stands_for_a_missing_field(field: str) -> None:
    declared = {"device": "devices", "dtype": "dtypes", "contract_version": "contracts"}.get(field, field)
    assert objection(msgspec.structs.replace(ONE, **{declared: ("*",)}), request(**{field: None})) is None
    empty = objection(msgspec.structs.replace(ONE, **{declared: ()}), request())
    assert empty is not None
    assert empty.code in ("capability_missing", "contract_not_preserved")


@pytest.mark.parametrize(
    ("fields", "code", "words"),
    [
        ({"shapes": SHAPES}, None, ""),
        ({"parallel": ("tp",), "topology": {"tp": 2, "cp": 1}, "shapes": {"head_dim": 64, "hidden": 1}}, None, ""),
        ({"parallel": ("tp", "cp"), "topology": {"tp": 2, "cp": 4}, "shapes": SHAPES | {"tp": 2}}, None, ""),
        ({"shapes": {"head_dim": 64, "tp": 1}}, "required_field_missing", "shapes.hidden"),
        ({"parallel": ("tp",), "topology": {"tp": 2}, "shapes": SHAPES}, "required_field_missing", "topology.cp"),
        ({"parallel": ("sp",), "topology": {"tp": 1, "cp": 1}, "shapes": SHAPES}, "required_field_missing", ".sp"),
        ({"parallel": ("ep",), "topology": {"tp": 1, "cp": 1, "ep": 2}, "shapes": SHAPES}, "capability_missing", "ep"),
        ({"shapes": SHAPES | {"head_dim": 8}}, "capability_missing", "head_dim 16 to 256, the request has 8"),
        ({"shapes": SHAPES | {"head_dim": 257}}, "capability_missing", "has 257"),
        ({"shapes": SHAPES | {"hidden": 0}}, "capability_missing", "hidden 1 and above"),
        ({"shapes": SHAPES, "device": "cuda"}, "capability_missing", "device cpu, the request has cuda"),
        ({"shapes": SHAPES, "dtype": "bfloat16"}, "capability_missing", "dtype float32"),
        ({"shapes": SHAPES, "autograd": "backward"}, "capability_missing", "autograd forward"),
        ({"shapes": SHAPES, "contract_version": "2"}, "contract_not_preserved", "contract_version 1"),
    ],
)
def test_a_request_is_matched_field_by_field(fields: dict[str, object], code: str | None, words: str) -> None:
    found = objection(WIDE, request(**fields))
    assert (None if found is None else found.code) == code
    assert words in (found.reason if found is not None else "")


def test_a_required_size_that_is_no_group_is_named_as_a_shape() -> None:
    sharded = msgspec.structs.replace(ONE, parallel=("tp",), requires=("vocabulary",))
    found = objection(sharded, request(parallel=("tp",)))
    assert found is not None
    assert found.enable == "state shapes.vocabulary, topology.tp"
    whole = {"parallel": ("tp",), "topology": {"tp": 2}, "shapes": {"vocabulary": 128}}
    assert objection(sharded, request(**whole)) is None


@pytest.mark.parametrize("claim", ["deterministic", "batch_invariant"])
def test_a_property_that_is_insisted_on_must_be_claimed(claim: str) -> None:
    assert objection(ONE, request(**{claim: True})) is None
    found = objection(msgspec.structs.replace(ONE, **{claim: False}), request(**{claim: True}))
    assert found is not None
    assert claim in found.reason


def test_a_missing_field_reaches_the_caller_as_its_own_code(tmp_path: Path) -> None:
    with registered(tmp_path, backend("p", "p", shapes=(("hidden", 1, 8),)), backend("r", "r", dtypes=())) as found:
        for name in ("auto", "p"):
            with pytest.raises(DecisionError, match=r"shapes\.hidden") as caught:
                found.resolve(Request(operator="twice", backend=name, **FULL))
            assert caught.value.code == "required_field_missing"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"parallel": ()}, "state `single` alone"),
        ({"parallel": ("single", "tp")}, "state `single` alone"),
        ({"topology": {"tp": 2}}, "they contradict"),
        ({"topology": {"tp": 0}}, "at least one rank"),
    ],
)
def test_a_request_that_contradicts_itself_is_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ContractError, match=message):
        request(**fields)


# -- declarations ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda one: "no operator", "OPERATOR is a str, not an Operator"),
        (lambda one: msgspec.structs.replace(one, name="two words"), "no identifier"),
        (lambda one: msgspec.structs.replace(one, op_class="magic"), r"malformed: .*op_class"),
        (lambda one: msgspec.structs.replace(one, surface=()), "declares no function or no backend"),
        (lambda one: msgspec.structs.replace(one, backends=one.backends * 2), "declared twice"),
        (lambda one: with_backend(one, name="auto"), "reserved name"),
        (lambda one: with_backend(one, bucket="native"), "the engine's own operator"),
        (lambda one: with_backend(one, fallback="nobody"), "falls back to 'nobody'"),
        (lambda one: with_backend(one, devices="cpu"), "malformed"),
        (lambda one: with_backend(one, name="elsewhere", fallback=None), "has no file .*elsewhere.py"),
    ],
)
def test_a_declaration_that_cannot_be_used_says_why(change: Callable[[object], object], message: str) -> None:
    good = operators()["linear"]
    assert objection_to(good) is None
    found = Registry()
    broken = change(msgspec.structs.replace(good, name="another"))
    with pytest.raises(ContractError, match=message):
        found.register(broken)
    assert "another" not in found.operators
    assert found.generation == 1


def with_backend(operator: object, **fields: object) -> object:
    return msgspec.structs.replace(operator, backends=(msgspec.structs.replace(operator.backends[0], **fields),))


def test_descriptors_cannot_be_changed() -> None:
    operator = operators()["linear"]
    for one in (operator, operator.backends[0]):
        with pytest.raises(AttributeError, match="immutable"):
            one.name = "other"
    with pytest.raises(TypeError):
        Registry().operators["linear"] = operator


def test_a_decision_on_a_registry_that_changed_since_is_stale() -> None:
    found = Registry()
    decision = found.resolve(Request(operator="embedding", **FULL))
    assert load(decision, found).__name__ == decision.implementation
    found.register(msgspec.structs.replace(operators()["embedding"], name="copied_rows"))
    with pytest.raises(DecisionError, match="generation 1 of the registry, which is now 2") as caught:
        load(decision, found)
    assert caught.value.code == "stale_registry"
    assert load(found.resolve(Request(operator="embedding", **FULL)), found).__name__ == decision.implementation


def test_looking_around_again_is_a_change_only_when_something_changed(tmp_path: Path) -> None:
    found = Registry()
    found.refresh()
    assert found.generation == 1
    with plugin(tmp_path) as made:
        made.write(declaration("twice", backend("torch", "p")), torch=DOUBLING).install()
        found.refresh()
        assert (found.generation, "twice" in found.operators) == (2, True)
    found.refresh()
    assert (found.generation, "twice" in found.operators) == (3, False)


def test_what_runs_as_the_engines_own_operator_has_no_module() -> None:
    with pytest.raises(ContractError, match="engine's own operator"):
        load(Decision("linear", "auto", "native", "", "the engine's own operator"))


def test_the_plain_call_is_a_reference_of_one_rank() -> None:
    made = resolve("masked_mean")
    assert (made.fast, made.consistency, made.device, made.fallback) == ("auto", "strict", "cpu", False)
    assert registry.default().generation == made.generation


# -- fingerprints ------------------------------------------------------------------------------------------------------


def test_the_build_fingerprint_names_what_bits_rest_on() -> None:
    facts = dict(build_facts(("triton", "no-such-distribution"), "cpu"))
    assert facts["torch"] == torch.__version__
    assert facts["no-such-distribution"] == "absent"
    assert facts["capability"] == torch.backends.cpu.get_cpu_capability()
    assert facts["triton_runs"] in ("interpreted", "compiled")
    assert build_fingerprint((), "cpu") != build_fingerprint(("no-such-distribution",), "cpu")
    assert build_fingerprint((), "cpu") == build_fingerprint((), "cpu")


def test_the_source_fingerprint_follows_what_a_backend_imports_and_nothing_else(tmp_path: Path) -> None:
    with plugin(tmp_path) as made:
        shared = {"shared": "from . import deep\nHALF = 0.5\n", "deep": "X = 1\n", "cases": "Y = 1\n"}
        torch_source = "def twice(x):\n    from .shared import HALF\n    return x / HALF\n"
        both = declaration("twice", backend("torch", "p"), backend("other", "o"))
        made.write(both, torch=torch_source, other=DOUBLING, **shared)
        __import__(made.package)
        name = f"{made.package}.torch"
        before = source_fingerprint(name)
        for module, text, same in (
            ("cases", "Y = 2\n", True),
            ("other", DOUBLING + "# changed\n", True),
            ("deep", "X = 2\n", False),
            ("shared", "from . import deep\nHALF = 0.25\n", False),
            ("torch", torch_source + "# changed\n", False),
        ):
            place = tmp_path / made.package / f"{module}.py"
            kept = place.read_text()
            place.write_text(text)
            assert (source_fingerprint(name) == before) is same, module
            place.write_text(kept)
        assert name not in sys.modules
        with pytest.raises(FileNotFoundError, match="was not found"):
            source_fingerprint(f"{made.package}.absent")


def test_backends_of_one_operator_have_sources_of_their_own() -> None:
    made = {name: resolve("linear", name) for name in ("torch", "reference")}
    assert made["torch"].source != made["reference"].source
    assert made["torch"].build == made["reference"].build
