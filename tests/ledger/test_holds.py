"""Holds: what stands between a run and its pruning."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from pruned_runs import ALL, RUN, A, segments, whole

from rlk_ledger import cli, holds, layout
from rlk_ledger.build import build, event
from rlk_ledger.checkpoints import make as make_checkpoint
from rlk_ledger.ledger import open_ledger
from rlk_ledger.retention import prune
from rlk_ledger.store import open_store
from rlk_ledger.verify import verify
from rlk_ledger_schemas.errors import LedgerError


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return whole(tmp_path)


def test_a_hold_stops_a_prune_before_it_and_one_placed_meanwhile_stops_it_at_the_next_batch(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = open_ledger(str(root))
    there = segments(root)
    held = holds.place(ledger.store, ledger.run(RUN).info, "litigation", "counsel")
    with pytest.raises(LedgerError, match=r"is held .*counsel: litigation.*nothing was deleted"):
        prune(ledger, RUN, ALL)
    assert segments(root) == there
    holds.release(ledger.store, ledger.run(RUN).info, held.hold_id, "counsel", "settled")

    monkeypatch.setattr("rlk_ledger.retention._AT_ONCE", 2)
    inner, deleted = ledger.store, []

    class Placing:
        """Places a hold while the first batch of deletes runs."""

        url = inner.url

        def __getattr__(self, name: str) -> Any:
            return getattr(inner, name)

        def delete(self, path: str) -> None:
            deleted.append(path)
            if len(deleted) == 2:
                holds.place(inner, ledger.run(RUN).info, "wait", "counsel")
            inner.delete(path)

    ledger.store = Placing()  # type: ignore[assignment]
    with pytest.raises(LedgerError, match=rf"2 of {len(there)} segments were deleted before it was seen"):
        prune(ledger, RUN, ALL)
    assert len(there - segments(root)) == 2
    assert "prune.unfinished" in {f.kind for f in verify(str(root)).findings}


def test_a_hold_that_arrives_with_the_tombstone_saves_everything(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = open_ledger(str(root))
    there = segments(root)
    original = ledger.writer

    def writer(*args: Any, **options: Any) -> Any:
        holds.place(ledger.store, ledger.run(RUN).info, "wait", "counsel")
        return original(*args, **options)

    monkeypatch.setattr(ledger, "writer", writer)
    with pytest.raises(LedgerError, match="0 of"):
        prune(ledger, RUN, ALL)
    assert there <= segments(root)


@pytest.mark.parametrize("victim", ["hold", "release"])
def test_a_hold_that_was_changed_still_stands_and_is_named(root: Path, victim: str) -> None:
    ledger = open_ledger(str(root))
    held = holds.place(ledger.store, ledger.run(RUN).info, "keep", "me")
    if victim == "release":
        holds.release(ledger.store, ledger.run(RUN).info, held.hold_id, "me")
        assert "run.held" not in {f.kind for f in verify(str(root)).findings}
    path = root / layout.hold_path(RUN, held.hold_id, victim == "release")
    path.write_bytes(path.read_bytes().replace(b'"by":"me"', b'"by":"mo"'))
    (found,) = [f for f in verify(str(root)).findings if f.severity == "error"]
    assert (found.kind, found.object) == ("hold.damaged", path.relative_to(root).as_posix())
    with pytest.raises(LedgerError, match="is held"):
        prune(open_ledger(str(root)), RUN, ALL)


def test_a_hold_copied_from_another_run_is_no_hold_of_this_one(root: Path) -> None:
    ledger = open_ledger(str(root))
    build(str(root), "other", [event("other", A, 0, "writer.closed", reason="x")])
    held = holds.place(ledger.store, ledger.run("other").info, "keep", "me")
    target = root / layout.hold_path(RUN, held.hold_id)
    target.parent.mkdir(parents=True)
    shutil.copy(root / layout.hold_path("other", held.hold_id), target)
    assert {f.kind for f in verify(str(root), RUN).findings if f.severity == "error"} == {"hold.damaged"}


def test_a_hold_that_is_removed_is_not_missed(root: Path) -> None:
    """The limit: no checkpoint covers a hold. Who may delete it may delete what it held, and `prune` says who did."""
    store = open_store(str(root))
    hold = holds.place(store, open_ledger(str(root)).run(RUN).info, "litigation", "counsel")
    copy = make_checkpoint(store, RUN)
    assert "run.held" in {f.kind for f in verify(str(root), checkpoints=[copy]).findings}
    store.delete(layout.hold_path(RUN, hold.hold_id))
    after = verify(str(root), checkpoints=[copy]).findings
    assert not [f for f in after if f.severity == "error" or "hold" in f.object]


def test_holds_are_placed_listed_and_released_from_the_command_line(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def call(*argv: str) -> tuple[int, Any]:
        code = cli.main([*argv, "--ledger", str(root), "--json"])
        out = capsys.readouterr().out
        return code, json.loads(out) if out else None

    code, placed = call("hold", RUN, "--reason", "audit 2026", "--by", "ann")
    assert code == 0
    assert call("prune", RUN, "--all")[0] == 2
    assert call("show", RUN)[1]["holds"] == 1
    _, listed = call("hold", RUN)
    assert [(h["hold_id"], h["stands"], h["placed"]["by"]) for h in listed["holds"]] == [
        (placed["placed"], True, "ann")
    ]
    code, listed = call("hold", RUN, "--release", placed["placed"], "--by", "ann")
    assert (code, listed["holds"][0]["stands"]) == (0, False)
    assert call("hold", RUN, "--release", placed["placed"])[0] == 2, "released already"
    assert call("hold", RUN, "--release", "0" * 16)[0] == 2, "no such hold"
    assert call("prune", RUN, "--all")[0] == 0
