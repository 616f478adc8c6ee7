"""Claim: a replay that was killed goes on where it was, with the bits of one that was not; only what has the same
identity and whole bytes is used again, and nothing that was written is ever changed."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlk_ledger.history import load_history
from rlk_ledger.ledger import Ledger, open_ledger
from rlk_ledger.pairs import pair
from rlk_ledger_replay.attempts import Attempts
from rlk_ledger_replay.preparation import Prepared, Request, prepare
from rlk_ledger_replay.run import replay
from rlk_ledger_replay.scores import Scores, score, scorings
from rlk_ledger_schemas.errors import UsageError

RUN = "r1"
Make = Callable[..., Ledger]
KILLED = """
import os, signal, sys
from pathlib import Path
from rlk_ledger.ledger import open_ledger
from rlk_ledger_replay.preparation import Request
from rlk_ledger_replay.run import replay

class Killing:
    left = int(sys.argv[3])
    def stage(self, name, total=None):
        pass
    def advance(self, units):
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

replay(open_ledger(sys.argv[1]), "r1", request=Request(6, attempts=Path(sys.argv[2])), progress=Killing())
"""


def prepared(ledger: Ledger) -> Prepared:
    history = load_history(ledger, RUN)
    pairing = pair(history)
    found = prepare(ledger, history, pairing, pairing.pairs, Request(4))
    return replace(found, passes=found.passes[1:3])


def scored(found: Prepared, attempts: Attempts | None = None) -> Scores:
    assert found.tokens is not None
    try:
        return score(found.selection.pairs, found.tokens, found.passes, found.models, attempts=attempts)
    finally:
        if attempts is not None:
            attempts.close()


def same(one: Scores, other: Scores) -> bool:
    return one.values.keys() == other.values.keys() and all(
        values.tobytes() == other.values[name].tobytes() for name, values in one.values.items()
    )


def answer(document: dict[str, Any]) -> str:
    """Everything a replay says but its own name, its time and where its scorings came from."""
    own = ("replay_id", "seconds", "attempts")
    return json.dumps({name: value for name, value in document.items() if name not in own}, sort_keys=True)


@pytest.mark.parametrize("units", [1, 7])
def test_a_killed_replay_resumes_to_the_same_answer_and_scores_only_what_is_missing(
    make_run: Make, tmp_path: Path, units: int
) -> None:
    ledger = make_run(groups=4)
    asked = Request(6, attempts=tmp_path / "kept")
    whole = replay(ledger, RUN, request=replace(asked, attempts=None), keep=False)
    command = [sys.executable, "-c", KILLED, ledger.url, str(tmp_path / "kept"), str(units)]
    assert subprocess.run(command, check=False).returncode == -signal.SIGKILL
    (left,) = (tmp_path / "kept").iterdir()
    before = left.read_bytes()
    assert whole.prepared.tokens is not None
    total = scorings(whole.prepared.tokens, whole.prepared.passes)
    result = replay(open_ledger(ledger.url), RUN, request=replace(asked, resume=True), keep=False)
    assert result.attempts is not None
    assert result.attempts["reused"] == before.count(b"\n") > 0
    assert result.attempts["scored"] == total - result.attempts["reused"] > 0
    assert answer(result.to_dict()) == answer(whole.to_dict())
    assert left.read_bytes() == before


def test_a_file_cut_anywhere_costs_the_scorings_whose_lines_are_not_whole(make_run: Make, tmp_path: Path) -> None:
    found = prepared(make_run(groups=2))
    first = Attempts(tmp_path, "first")
    whole = scored(found, first)
    data = first.file.read_bytes()
    total = data.count(b"\n")
    assert found.tokens is not None
    assert first.scored == total == scorings(found.tokens, found.passes)
    for at, cut in enumerate((0, 1, data.index(b"\n"), data.index(b"\n") + 1, len(data) // 2, len(data) - 1)):
        first.file.write_bytes(data[:cut])
        again = Attempts(tmp_path, f"again-{at}", resume=True)
        assert same(scored(found, again), whole)
        assert (again.reused, again.scored) == (data[:cut].count(b"\n"), total - data[:cut].count(b"\n"))
        again.file.unlink(missing_ok=True)


def test_an_altered_value_or_digest_is_scored_again(make_run: Make, tmp_path: Path) -> None:
    found = prepared(make_run(groups=2))
    first = Attempts(tmp_path, "first")
    whole = scored(found, first)
    lines = first.file.read_bytes().splitlines(keepends=True)
    record = json.loads(lines[0])
    record["values"] = ("B" if record["values"][0] == "A" else "A") + record["values"][1:]
    lines[0] = json.dumps(record).encode() + b"\n"
    lines[1] = b"not json\n"
    first.file.write_bytes(b"".join(lines))
    again = Attempts(tmp_path, "again", resume=True)
    assert same(scored(found, again), whole)
    assert (again.reused, again.scored) == (len(lines) - 2, 2)


def test_nothing_is_used_of_other_weights_numerics_inputs_scorer_or_tolerances(
    make_run: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = prepared(make_run(groups=2))
    scored(found, Attempts(tmp_path, "first"))
    other = {version: replace(model, digest=None) for version, model in found.models.items()}
    colder = [
        replace(one, numerics=tuple(n and replace(n, temperature=0.5) for n in one.numerics)) for one in found.passes
    ]
    moved = list(found.selection.pairs)
    tokens = np.array(moved[0].sample.response_token_ids)
    tokens[0] = (tokens[0] + 1) % 256
    moved[0] = replace(moved[0], sample=replace(moved[0].sample, response_token_ids=tokens))

    def reused(name: str, changed: Prepared) -> int:
        attempts = Attempts(tmp_path, name, resume=True)
        scored(changed, attempts)
        attempts.file.unlink(missing_ok=True)
        return attempts.reused

    assert found.tokens is not None
    total = scorings(found.tokens, found.passes)
    assert reused("same", found) == total
    assert reused("unchecked", replace(found, models=other)) == 0
    assert reused("numerics", replace(found, passes=tuple(colder))) == 0
    changed = replace(found, selection=replace(found.selection, pairs=tuple(moved)))
    assert reused("inputs", changed) == total - total // len(moved)
    monkeypatch.setattr("rlk_ledger_replay.build._sources", lambda: "sha256:other")
    assert reused("scorer", found) == 0
    monkeypatch.undo()
    monkeypatch.setattr("rlk_ledger_schemas.tolerances.FINGERPRINT", "sha256:other")
    assert reused("tolerances", found) == 0


def test_attempts_are_appended_to_by_one_replay_alone(tmp_path: Path) -> None:
    first = Attempts(tmp_path, "one")
    with pytest.raises(UsageError, match="RLK_ATTEMPTS"):
        Attempts(tmp_path, "one")
    first.close()
    assert not list(tmp_path.iterdir())
