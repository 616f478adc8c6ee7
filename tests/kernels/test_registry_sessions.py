"""A session per case: it binds what was decided, records it, and leaves nothing to the next case."""

import gc
import json
import pickle
import sys
import weakref
from pathlib import Path

import msgspec
import pytest
import torch
from plugin_folder import DOUBLING, backend, declaration, plugin, registered

from rlk_ledger_kernels.decision import Decision, callable_id, confirm
from rlk_ledger_kernels.errors import ContractError, DecisionError
from rlk_ledger_kernels.registry import Registry, Request
from rlk_ledger_kernels.session import Session
from rlk_ledger_schemas.events import OperatorDecided

FULL = {"device": "cpu", "dtype": "float32", "autograd": "forward", "parallel": ("single",), "contract_version": "1"}
TWICE = Request(operator="twice", contract_id="sha256:00", **FULL)

BROKEN_IMPORT = "import no_such_library_anywhere\n"
INCOMPLETE = "def thrice(x):\n    return 3 * x\n"
NAMELESS = "from functools import partial\ntwice = partial(lambda x: x + x)\n"
PER_CASE = (
    "class Case:\n"
    "    def __init__(self, request):\n        self.seen = [request.dtype]\n"
    "    def twice(self, x):\n        self.seen.append(x)\n        return x + x\n"
    "def instance(request):\n    return Case(request)\n"
)


def test_a_bound_operator_runs_what_was_decided(tmp_path: Path) -> None:
    with registered(tmp_path, backend("torch", "p")) as registry, Session(registry=registry) as case:
        bound = case.bind(TWICE)
        assert bound.twice(torch.tensor([1.5])).tolist() == [3.0]
        (record,) = case.provenance
        assert record.decision is bound.decision
        assert record.callables == {"twice": f"{bound.decision.implementation}.twice"}
        assert record.reported is None
        with pytest.raises(AttributeError, match="has no 'thrice'; it has twice"):
            bound.thrice(1)


def test_the_event_of_a_decision_is_the_ledgers_own(tmp_path: Path) -> None:
    gone = backend("p", "p", needs=("no-such-distribution",), enable="install it", fallback="r")
    with registered(tmp_path, gone, backend("r", "r")) as registry, Session(registry=registry) as case:
        bound = case.bind(TWICE)
        event = case.provenance[0].to_event("reference")
    assert isinstance(event, OperatorDecided)
    fields = event.fields()
    assert (fields["requested_backend"], fields["actual_backend"], fields["fallback"]) == ("auto", "r", True)
    assert fields["mode"] == {"fast": "auto", "consistency": "strict"}
    assert (fields["bucket"], fields["contract_id"]) == ("reference", "sha256:00")
    assert (fields["build"], fields["source"]) == (bound.decision.build, bound.decision.source)
    assert fields["callables"] == {"twice": f"{bound.decision.implementation}.twice"}
    (rejected,) = msgspec.to_builtins(fields["rejected"])
    assert (rejected["backend"], rejected["code"], rejected["enable"]) == ("p", "backend_unavailable", "install it")
    json.dumps(msgspec.to_builtins(fields))


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (BROKEN_IMPORT, "ModuleNotFoundError"),
        ("def\n", "SyntaxError"),
        (INCOMPLETE, "lacks twice of the operator's surface"),
        (NAMELESS, "no module and qualified name"),
    ],
)
def test_a_backend_that_does_not_load_is_rejected_in_this_case_only(tmp_path: Path, module: str, words: str) -> None:
    declared = backend("first", "p", fallback="r"), backend("second", "p"), backend("r", "r")
    with registered(tmp_path, *declared, first=module) as registry:
        with Session(registry=registry) as case:
            bound = case.bind(TWICE)
            assert bound.decision.actual == "second"
            assert "it did not load" in bound.decision.rejected[0].reason
            assert words in bound.decision.rejected[0].reason
            assert case.bind(TWICE).decision.actual == "second"
            with pytest.raises(DecisionError, match="it did not load") as caught:
                case.bind(msgspec.structs.replace(TWICE, backend="first"))
            assert caught.value.code == "backend_unavailable"
        package = registry.operator("twice").package
        Path(sys.modules[package].__path__[0], "first.py").write_text(DOUBLING + f"# {'repaired ' * 20}\n")
        sys.modules.pop(f"{package}.first", None)
        with Session(registry=registry) as case:
            assert case.bind(TWICE).decision.actual == "first", "the next case starts as if there had been none"


def test_fast_strict_does_not_fall_back_when_its_backend_does_not_load(tmp_path: Path) -> None:
    declared = backend("p", "p", fallback="r"), backend("r", "r")
    with registered(tmp_path, *declared, p=BROKEN_IMPORT) as registry:
        with Session(fast="strict", registry=registry) as case, pytest.raises(DecisionError) as caught:
            case.bind(TWICE)
        assert caught.value.code == "no_optimised_backend"
        with Session(registry=registry) as case:
            assert (case.bind(TWICE).decision.actual, case.fallbacks()) == ("r", 1)


def test_no_reference_outlives_its_case(tmp_path: Path) -> None:
    with registered(tmp_path, backend("torch", "p"), torch=PER_CASE) as registry:
        case = Session(registry=registry)
        bound = case.bind(TWICE)
        operand, workspace = torch.ones(3), torch.zeros(3)
        bound.twice(operand)
        case.cache["workspace"] = workspace
        case.admit_native(bound.decision, [operand], bound.twice, lambda x: x + x)
        refs = [weakref.ref(one) for one in (case, bound, bound.target, operand, workspace)]
        case.close()
        del bound, operand, workspace
        gc.collect()
        assert [one() is None for one in refs] == [False, True, True, True, True], "the caller still holds the session"
        assert len(case.verdicts) == 0
        assert len(case.provenance) == 1, "what ran stays readable"
        del case
        gc.collect()
        assert refs[0]() is None


def test_a_case_that_failed_leaves_no_reference_either(tmp_path: Path) -> None:
    with registered(tmp_path, backend("torch", "p"), torch=PER_CASE) as registry:
        refs = []

        def failing() -> None:
            with Session(registry=registry) as case:
                bound = case.bind(TWICE)
                refs.extend(weakref.ref(one) for one in (case, bound, bound.target))
                bound.twice("text" if len(refs) > 3 else None)

        with pytest.raises(TypeError):
            failing()
        gc.collect()
        assert [one() for one in refs] == [None] * 3


def test_each_case_has_an_instance_of_its_own(tmp_path: Path) -> None:
    with (
        registered(tmp_path, backend("torch", "p"), torch=PER_CASE) as registry,
        Session(registry=registry) as first,
        Session(registry=registry) as second,
    ):
        one, other = first.bind(TWICE), second.bind(TWICE)
        one.twice(5)
        assert (one.target.seen, other.target.seen) == (["float32", 5], ["float32"])
        assert first.provenance[0].callables["twice"].endswith("torch.Case.twice")


def test_a_closed_case_binds_nothing_and_what_it_bound_is_gone(tmp_path: Path) -> None:
    with registered(tmp_path, backend("torch", "p")) as registry:
        with Session(registry=registry) as case:
            bound = case.bind(TWICE)
        case.close()
        with pytest.raises(ContractError, match="this case is closed"):
            case.bind(TWICE)
        with pytest.raises(AttributeError, match="its case is closed"):
            bound.twice(1)


def test_the_engines_own_operator_is_bound_to_nothing(tmp_path: Path) -> None:
    with (
        registered(tmp_path, backend("torch", "p")) as registry,
        Session(fast="off", consistency="audit", registry=registry) as case,
    ):
        bound = case.bind(TWICE)
        assert (bound.decision.actual, bound.target, case.fallbacks()) == ("native", None, None)
        event = case.provenance[0].to_event("rollout")
    assert (event.actual_backend, event.implementation, event.callables) == ("native", None, None)


@pytest.mark.parametrize(
    ("fast", "consistency", "expected"),
    [("off", "off", None), ("strict", "off", None), ("auto", "strict", 0), ("auto", "off", 0)],
)
def test_fallback_is_measured_only_where_it_is_the_declared_knob(
    tmp_path: Path, fast: str, consistency: str, expected: int | None
) -> None:
    with (
        registered(tmp_path, backend("torch", "p")) as registry,
        Session(fast=fast, consistency=consistency, registry=registry) as case,
    ):
        case.bind(TWICE)
        assert case.fallbacks() == expected


# -- what ran ----------------------------------------------------------------------------------------------------------


def test_what_ran_is_confirmed_or_it_is_a_silent_fallback(tmp_path: Path) -> None:
    with (
        registered(tmp_path, backend("torch", "p"), backend("other", "p")) as registry,
        Session(registry=registry) as case,
    ):
        bound = case.bind(TWICE)
        other = case.bind(msgspec.structs.replace(TWICE, backend="other"))
        for ran in ("torch", bound.decision.implementation, bound.twice):
            case.confirm(bound, ran)
        for ran in ("other", other.decision.implementation, other.twice, torch.nn.functional.silu):
            with pytest.raises(DecisionError, match="twice was decided to run on torch") as caught:
                case.confirm(bound, ran)
            assert caught.value.code == "silent_fallback"


def test_a_function_the_backend_shares_with_another_module_is_confirmed_by_its_own_id(tmp_path: Path) -> None:
    with plugin(tmp_path) as made:
        made.write(declaration("twice", backend("torch", "p")), shared=DOUBLING, torch="from .shared import twice\n")
        made.install()
        with Session(registry=Registry()) as case:
            bound = case.bind(TWICE)
            assert case.provenance[0].callables == {"twice": f"{made.package}.shared.twice"}
            case.confirm(bound, bound.twice)
            with pytest.raises(DecisionError):
                confirm(bound.decision, bound.twice)


def test_what_is_confirmed_on_a_registry_that_changed_is_stale(tmp_path: Path) -> None:
    with registered(tmp_path, backend("torch", "p")) as registry, Session(registry=registry) as case:
        bound = case.bind(TWICE)
        registry.register(msgspec.structs.replace(registry.operator("linear"), name="another"))
        with pytest.raises(DecisionError) as caught:
            case.confirm(bound, "torch")
        assert caught.value.code == "stale_registry"
        assert case.bind(TWICE).decision.generation == registry.generation


def test_a_native_decision_is_confirmed_by_name() -> None:
    native = Decision("linear", "auto", "native", "", "the engine's own operator")
    confirm(native, "native")
    with pytest.raises(DecisionError, match="and torch ran"):
        confirm(native, "torch")


def test_a_callables_id_is_its_own_and_not_what_somebody_calls_it() -> None:
    renamed = torch.nn.functional.silu
    assert callable_id(renamed) == "torch.nn.functional.silu"
    assert callable_id(Session.bind) == "rlk_ledger_kernels.session.Session.bind"
    with pytest.raises(TypeError, match="no module and qualified name"):
        callable_id(__import__("functools").partial(renamed))


# -- what a backend says of itself -------------------------------------------------------------------------------------

CLAIMS = (
    "told = {'actual_backend': 'fastest', 'bucket': 'contract_preserving', 'nested': {'fallback': [1, 2]}}\n"
    "def describe():\n    return told\n"
)


def test_what_a_backend_reports_is_kept_apart_and_overwrites_nothing(tmp_path: Path) -> None:
    with (
        registered(tmp_path, backend("torch", "o"), torch=DOUBLING + CLAIMS) as registry,
        Session(consistency="off", registry=registry) as case,
    ):
        bound = case.bind(TWICE)
        sys.modules[bound.decision.implementation].told["nested"]["fallback"].append(3)
        event = case.provenance[0].to_event("rollout")
    assert (event.actual_backend, event.bucket, event.fallback) == ("torch", "opportunistic", False)
    assert msgspec.to_builtins(event.fields()["reported"]) == {
        "actual_backend": "fastest",
        "bucket": "contract_preserving",
        "nested": {"fallback": [1, 2]},
    }


@pytest.mark.parametrize(
    ("body", "words"),
    [("raise OSError('gone')", "OSError: gone"), ("return {'x': object()}", "cannot hold"), ("return [1]", "a list")],
)
def test_a_description_that_cannot_be_read_stops_nothing(tmp_path: Path, body: str, words: str) -> None:
    with (
        registered(tmp_path, backend("torch", "p"), torch=f"{DOUBLING}def describe():\n    {body}\n") as registry,
        Session(registry=registry) as case,
    ):
        assert case.bind(TWICE).twice(2) == 4
        assert words in (case.provenance[0].reported or {})["unreadable"]


def test_an_error_crosses_processes_with_its_code_and_reasons(tmp_path: Path) -> None:
    with (
        registered(tmp_path, backend("p", "p", needs=("no-such-distribution",))) as registry,
        pytest.raises(DecisionError) as caught,
    ):
        registry.resolve(TWICE, "strict", "off")
    copy = pickle.loads(pickle.dumps(caught.value))
    assert (str(copy), copy.code, copy.rejected) == (str(caught.value), "no_optimised_backend", caught.value.rejected)
