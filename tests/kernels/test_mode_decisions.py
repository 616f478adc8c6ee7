"""fast x consistency as the registry decides it: nine pairs, every set of backends that can run, one outcome each."""

import itertools
import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from plugin_folder import backend, plugin, registered

from rlk_ledger_kernels.descriptors import Backend
from rlk_ledger_kernels.errors import ContractError, DecisionError
from rlk_ledger_kernels.registry import Decision, Registry, Request, confirm, load
from rlk_ledger_schemas.modes import CONSISTENCY, FAST, REASONS

SETS = ("", "r", "o", "or", "p", "pr", "po", "por")
"""Which of the three backends can run: contract-preserving, opportunistic, reference. The others lack a library."""

NATIVE, STANDS_IN = "native", "native, as a fallback"
NO_FAST, NOT_KEPT, GONE = "no_optimised_backend", "contract_not_preserved", "backend_unavailable"
UNSTATED = "required_field_missing"

OUTCOMES = {
    ("off", "off"): (NATIVE,) * 8,
    ("off", "audit"): (NATIVE,) * 8,
    ("off", "strict"): (UNSTATED,) * 8,
    ("auto", "off"): (STANDS_IN, STANDS_IN, "o", "o", "p", "p", "p", "p"),
    ("auto", "audit"): (STANDS_IN, STANDS_IN, "o", "o", "p", "p", "p", "p"),
    ("auto", "strict"): (GONE, "r, as a fallback", NOT_KEPT, "r, as a fallback", "p", "p", "p", "p"),
    ("strict", "off"): (NO_FAST, NO_FAST, "o", "o", "p", "p", "p", "p"),
    ("strict", "audit"): (NO_FAST, NO_FAST, "o", "o", "p", "p", "p", "p"),
    ("strict", "strict"): (NO_FAST, NO_FAST, NOT_KEPT, NOT_KEPT, "p", "p", "p", "p"),
}
"""By pair, one outcome for each of SETS: the backend that runs, or the code of the error."""

FULL = {"device": "cpu", "dtype": "float32", "autograd": "forward", "parallel": ("single",), "contract_version": "1"}
REQUEST = Request(operator="of_the_table", **FULL)
ALONE = Request(operator="twice", **FULL)
KEEPS = Backend(name="engine", bucket="contract_preserving", devices=("cpu",))


@pytest.fixture(scope="module", params=SETS, ids=lambda able: f"able-{able or 'none'}")
def able(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Registry]]:
    """A registry whose operator declares all three backends, of which those in the parameter can run."""
    lacking = {"needs": ("no-such-distribution",), "enable": "install it"}
    fallback = {"p": {"fallback": "r"}, "o": {}, "r": {}}
    declared = [backend(one, one, **fallback[one], **({} if one in request.param else lacking)) for one in "por"]
    with registered(tmp_path_factory.mktemp("modes"), *declared, name="of_the_table") as registry:
        yield request.param, registry


def outcome(registry: Registry, request: Request, fast: str, consistency: str) -> str:
    try:
        made = registry.resolve(request, fast, consistency)
    except DecisionError as error:
        return error.code
    assert (made.fast, made.consistency) == (fast, consistency)
    return made.actual + (", as a fallback" if made.fallback else "")


def test_the_outcomes_cover_every_pair() -> None:
    assert OUTCOMES.keys() == set(itertools.product(FAST, CONSISTENCY))


@pytest.mark.parametrize("pair", OUTCOMES, ids="-".join)
def test_every_pair_and_every_set_of_backends_has_its_outcome(
    able: tuple[str, Registry], pair: tuple[str, str]
) -> None:
    which, registry = able
    assert outcome(registry, REQUEST, *pair) == OUTCOMES[pair][SETS.index(which)]


@pytest.mark.parametrize("consistency", CONSISTENCY)
def test_fast_strict_decides_before_consistency(able: tuple[str, Registry], consistency: str) -> None:
    """Without an optimised backend the reason is that, whatever consistency says; with one, consistency may object."""
    which, registry = able
    got = outcome(registry, REQUEST, "strict", consistency)
    assert (got == NO_FAST) == (not set(which) & {"p", "o"})


@pytest.mark.parametrize("pair", OUTCOMES, ids="-".join)
def test_a_backend_asked_for_by_name_runs_or_fails_and_never_becomes_another(
    able: tuple[str, Registry], pair: tuple[str, str]
) -> None:
    which, registry = able
    for name in "por":
        got = outcome(registry, msgspec.structs.replace(REQUEST, backend=name), *pair)
        closed = {"off": "por", "auto": "r", "strict": "r"}[pair[0]]
        closed = {"auto": "o", "strict": "ro"}.get(pair[0], "por") if pair[1] == "strict" else closed
        if name not in closed:
            assert got == (name if name in which else GONE)
        elif pair[0] == "off":
            assert got == "mode_excludes"
        elif name == "o":
            assert got == NOT_KEPT
        else:
            assert got == (NO_FAST if pair[0] == "strict" else "mode_excludes")


@pytest.mark.parametrize(
    ("native", "expected"),
    [
        (KEEPS, NATIVE),
        (msgspec.structs.replace(KEEPS, bucket="opportunistic"), NOT_KEPT),
        (msgspec.structs.replace(KEEPS, contracts=("2",)), NOT_KEPT),
        (msgspec.structs.replace(KEEPS, dtypes=("bfloat16",)), "capability_missing"),
        (msgspec.structs.replace(KEEPS, shapes=(("hidden", 1, None),)), UNSTATED),
        (None, UNSTATED),
    ],
)
def test_strict_without_fast_takes_the_engines_own_operator_only_with_its_contract(
    able: tuple[str, Registry], native: Backend | None, expected: str
) -> None:
    assert outcome(able[1], msgspec.structs.replace(REQUEST, native=native), "off", "strict") == expected


@pytest.mark.parametrize(
    ("pair", "expected"),
    [
        (("off", "off"), NATIVE),
        (("auto", "audit"), NATIVE),
        (("auto", "strict"), NOT_KEPT),
        (("strict", "off"), NO_FAST),
        (("strict", "strict"), NO_FAST),
    ],
)
def test_the_engines_own_operator_may_be_asked_for_by_name(
    able: tuple[str, Registry], pair: tuple[str, str], expected: str
) -> None:
    assert outcome(able[1], msgspec.structs.replace(REQUEST, backend="native"), *pair) == expected


@pytest.mark.parametrize(
    ("fallback", "expected"), [("r", "r, as a fallback"), (None, GONE)], ids=["named", "by no backend"]
)
def test_a_reference_stands_in_only_where_a_better_backend_names_it(
    tmp_path: Path, fallback: str | None, expected: str
) -> None:
    gone = backend("p", "p", needs=("no-such-distribution",), fallback=fallback)
    with registered(tmp_path, gone, backend("r", "r")) as registry:
        assert outcome(registry, ALONE, "auto", "strict") == expected


def test_auto_takes_the_first_declared_and_leaves_experimental_ones_alone(tmp_path: Path) -> None:
    declared = backend("new", "p", lifecycle="experimental"), backend("best", "p"), backend("second", "p")
    with registered(tmp_path, *declared) as registry:
        made = registry.resolve(ALONE, "strict", "strict")
        assert made.actual == "best"
        assert [(one.backend, one.code) for one in made.rejected] == [("new", "mode_excludes"), ("second", None)]
        assert registry.resolve(msgspec.structs.replace(ALONE, backend="new"), "auto", "off").actual == "new"


def test_fast_strict_is_not_met_by_an_experimental_backend(tmp_path: Path) -> None:
    with registered(tmp_path, backend("new", "p", lifecycle="experimental")) as registry:
        assert outcome(registry, ALONE, "strict", "off") == NO_FAST


def test_every_candidate_keeps_its_reason_and_what_would_enable_it(tmp_path: Path) -> None:
    gone = backend("p", "p", needs=("no-such-distribution",), enable="install it", fallback="r")
    with registered(tmp_path, gone, backend("o", "o"), backend("r", "r")) as registry:
        rejected = {one.backend: one for one in registry.resolve(ALONE, "auto", "strict").rejected}
        with pytest.raises(DecisionError) as caught:
            registry.resolve(ALONE, "strict", "strict")
    assert (rejected["p"].code, rejected["p"].enable) == (GONE, "install it")
    assert "no-such-distribution is not installed" in rejected["p"].reason
    assert rejected["o"].code == NOT_KEPT
    assert {one.backend for one in caught.value.rejected} == {"p", "o", "r"}
    assert "p: no-such-distribution is not installed" in str(caught.value)


def test_a_fallback_is_told_once_and_never_in_a_loop(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    gone = backend("p", "p", needs=("no-such-distribution",))
    with registered(tmp_path, gone) as registry, caplog.at_level(logging.WARNING, logger="rlk_ledger"):
        made = [registry.resolve(ALONE, "auto", "off") for _ in range(3)]
    assert all(one.fallback and one.actual == NATIVE for one in made)
    assert [record.getMessage() for record in caplog.records] == [
        "twice falls back to native (p: no-such-distribution is not installed)"
    ]


def test_what_does_not_exist_is_refused_by_name(able: tuple[str, Registry]) -> None:
    with pytest.raises(ContractError, match="operator 'conv' does not exist; known are"):
        able[1].resolve(Request(operator="conv", **FULL))
    with pytest.raises(ContractError, match="backend 'x' of of_the_table does not exist; choose auto, p, o, r"):
        able[1].resolve(Request(operator="of_the_table", backend="x", **FULL))


def test_a_decision_names_nothing_to_load_for_the_engines_own_operator(able: tuple[str, Registry]) -> None:
    made: Decision = able[1].resolve(REQUEST, "off", "off")
    assert (made.actual, made.implementation, made.build, made.source) == (NATIVE, "", None, None)


# -- every reason code of an operator is reached -----------------------------------------------------------------------


def _stale(registry: Registry) -> None:
    made = registry.resolve(ALONE, "auto", "off")
    registry.register(msgspec.structs.replace(registry.operator("linear"), name="another"))
    load(made, registry)


def _swapped(registry: Registry) -> None:
    confirm(registry.resolve(ALONE, "auto", "off"), "native")


def _broken(registry: Registry) -> None:
    (entry,) = registry.rejected
    raise DecisionError(entry.code or "", entry.reason)


REACHED: dict[str, Callable[[Registry], object]] = {
    "no_optimised_backend": lambda found: found.resolve(asking(dtype="bfloat16"), "strict", "audit"),
    "contract_not_preserved": lambda found: found.resolve(asking(contract_version="2"), "auto", "strict"),
    "required_field_missing": lambda found: found.resolve(asking(dtype=None), "auto", "strict"),
    "capability_missing": lambda found: found.resolve(asking(backend="p", device="cuda"), "auto", "off"),
    "backend_unavailable": lambda found: found.resolve(asking(backend="gone"), "auto", "off"),
    "mode_excludes": lambda found: found.resolve(asking(backend="p"), "off", "off"),
    "declaration_broken": _broken,
    "silent_fallback": _swapped,
    "stale_registry": _stale,
}


def asking(**fields: object) -> Request:
    return msgspec.structs.replace(ALONE, **fields)


def test_the_reached_codes_are_those_of_an_operator() -> None:
    assert REACHED.keys() == {code for code, reason in REASONS.items() if reason.scope == "operator"}


@pytest.mark.parametrize("code", REACHED)
def test_every_reason_of_an_operator_is_reached_and_says_what_to_do(tmp_path: Path, code: str) -> None:
    (tmp_path / "bad").mkdir()
    (tmp_path / "good").mkdir()
    gone = backend("gone", "p", needs=("no-such-distribution",))
    with plugin(tmp_path / "bad") as bad:
        bad.write("OPERATOR = 3\n").install()
        good = registered(tmp_path / "good", backend("p", "p"), gone)
        with good as registry, pytest.raises(DecisionError) as caught:
            REACHED[code](registry)
    assert caught.value.code == code
    assert str(caught.value).endswith(f"[{code}]. {REASONS[code].next_step}")
