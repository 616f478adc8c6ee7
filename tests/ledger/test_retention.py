"""Holds, tombstones and pruning: what may go, what stays readable, and what is never taken for a loss."""

import contextlib
import io
import re
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pruned_runs import ALL, RUN, A, life, make, segments, whole

from rlk_ledger import cli, layout
from rlk_ledger.audit import audit
from rlk_ledger.build import event
from rlk_ledger.chain import Chain
from rlk_ledger.checkpoints import latest
from rlk_ledger.checkpoints import make as make_checkpoint
from rlk_ledger.contact import meet
from rlk_ledger.history import load_history
from rlk_ledger.ledger import open_ledger
from rlk_ledger.retention import Policy, prune
from rlk_ledger.signing import new_key
from rlk_ledger.store import FileStore, Store, open_store
from rlk_ledger.summary import detail, overview
from rlk_ledger.tombstones import NEEDED, TYPE
from rlk_ledger.verify import verify
from rlk_ledger.verify.finding import Finding
from rlk_ledger_schemas.errors import LedgerError, StoreError
from rlk_ledger_schemas.objects import RunInfo

INFO: dict[str, Any] = {"format": 1, "ledger_id": "", "run_id": RUN, "roles": {}, "mode": {}, "redaction": "none"}
INFO["created_us"] = 0


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return whole(tmp_path)


def comparable(findings: tuple[Finding, ...], added: tuple[str, ...] = ("segment.pruned",)) -> list[Finding]:
    return [f for f in findings if f.kind not in added]


@pytest.mark.parametrize("policy", [ALL, Policy(before_step=3), Policy(older_than_s=0.0)])
@pytest.mark.parametrize("deep", [False, True])
def test_verify_says_of_writers_ranks_gaps_and_numbers_exactly_what_it_said_before(
    root: Path, policy: Policy, deep: bool
) -> None:
    before = verify(str(root), deep=deep)
    assert {"rank.missing", "seqs.dropped", "bytes.lost", "writer.killed", "run.redeclared"} <= {
        f.kind for f in before.findings
    }
    done = prune(open_ledger(str(root)), RUN, policy, reason="90 days", by="me")
    after = verify(str(root), deep=deep)
    assert done.deleted == done.segments > 0
    assert comparable(after.findings) == list(before.findings)
    assert (after.exit_code, after.verdict) == (before.exit_code, before.verdict)
    named = [f for f in after.findings if f.kind == "segment.pruned"]
    assert sum(int(f.text.split()[0]) for f in named) == done.deleted
    assert all("pruned by me: 90 days" in f.text and f.severity == "info" for f in named)


def test_a_policy_takes_whole_segments_below_a_step_or_of_an_age_and_no_others(root: Path) -> None:
    ledger = open_ledger(str(root))
    expected = {
        r.segment.name.rpartition("/")[2]
        for r in ledger.run(RUN).receipts
        if (steps := [t.max_step for t in r.types if t.max_step is not None]) and max(steps) < 3
    }
    assert expected
    before = segments(root)
    assert prune(ledger, RUN, Policy(older_than_s=3600.0)).segments == 0
    assert prune(ledger, RUN, Policy(older_than_s=3600.0, before_step=3)).segments == 0, "both conditions hold"
    assert segments(root) == before
    prune(ledger, RUN, Policy(before_step=3))
    assert before - segments(root) == expected


def test_a_dry_run_says_what_would_go_and_changes_nothing(root: Path) -> None:
    before = sorted(p for p in root.rglob("*"))
    would = prune(open_ledger(str(root)), RUN, ALL, dry_run=True)
    assert (would.segments, would.deleted) == (len(segments(root)), 0)
    assert sorted(p for p in root.rglob("*")) == before


def test_prune_and_verify_count_what_is_gone_alike(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Some rows of pruned segments stay as statements; verify says how many segments it could not look at."""
    there = segments(root)
    done = prune(open_ledger(str(root)), RUN, Policy(before_step=3))
    gone = len(there - segments(root))
    texts = [f.text for f in verify(str(root)).findings if f.kind == "segment.pruned"]
    assert done.stated > 0
    assert sum(int(re.search(r"\((\d+) events", text)[1]) for text in texts) == done.events - done.stated
    assert done.deleted == verify(str(root)).pruned == gone
    assert cli.main(["verify", "--ledger", str(root)]) == 3
    assert f"segments ({gone} of them pruned)," in capsys.readouterr().out


def test_readers_go_on_with_what_is_left_and_say_what_is_not(root: Path) -> None:
    ledger = open_ledger(str(root))
    whole = {(r.writer_id, r.seq): r for r in ledger.run(RUN).records()}
    prune(ledger, RUN, Policy(before_step=3), by="me", reason="old")
    ledger = open_ledger(str(root))
    left = {(r.writer_id, r.seq): r for r in ledger.run(RUN).records()}
    kept = {key: r for key, r in left.items() if key in whole}
    assert all(whole[key] == record for key, record in kept.items()), "what is left is what was, bit for bit"
    names = {r.envelope for r in whole.values()} - {r.envelope for r in left.values()}
    assert names
    assert not any(t.encode() in envelope for envelope in names for t in NEEDED), "what the run rests on is stated"
    assert ledger.sql("select distinct step from samples order by 1").arrow()["step"].to_pylist() == [3, 4, 5]
    history = load_history(ledger, RUN)
    assert {s.step for s in history.samples} == {3, 4, 5}
    assert {w["role"] for w in history.writers.values()} == {"rollout", "training", "retention"}
    (found,) = [f for f in audit(history).findings if f.finding_id == "evidence.pruned"]
    assert found.severity == "gap"
    assert (found.where["first_step"], found.where["last_step"]) == (0, 2)
    assert found.evidence["by"] == ["me"]
    assert not [f for f in audit(history).findings if f.severity == "error"]
    shown = detail(ledger, RUN)
    assert shown["pruned"]["segments"] == found.where["segments"]
    assert shown["tokens"] == 12
    assert overview(ledger.run(RUN))["pruned_segments"] == found.where["segments"]
    runs = ledger.sql("select run_id, pruned_segments from runs").arrow().to_pylist()
    assert runs == [{"run_id": RUN, "pruned_segments": found.where["segments"]}]


def test_a_run_pruned_whole_still_answers_every_reader(root: Path) -> None:
    prune(open_ledger(str(root)), RUN, ALL)
    ledger = open_ledger(str(root))
    assert detail(ledger, RUN)["tokens"] == 0
    for view in ("samples", "logprobs", "tokens", "drift"):
        assert ledger.sql(f"select count(*) as n from {view}").arrow().to_pylist() == [{"n": 0}]
    assert ledger.sql("select count(*) as n from gaps").arrow().to_pylist() == [{"n": 1}]
    result = audit(load_history(ledger, RUN))
    assert result.exit_code == 3
    assert "evidence.pruned" in {f.finding_id for f in result.findings}
    assert prune(ledger, RUN, ALL).segments == 0, "a tombstone is never pruned"


@pytest.mark.parametrize("argv", [["audit", RUN], ["drift", RUN], ["show", RUN], ["query", "select * from samples"]])
def test_commands_say_that_something_was_pruned(
    root: Path, argv: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    prune(open_ledger(str(root)), RUN, Policy(before_step=3), by="me", reason="old")
    assert cli.main([*argv, "--ledger", str(root)]) != 2
    said = capsys.readouterr()
    assert "pruned" in said.out + said.err
    if argv[0] == "query":
        assert "pruned" not in said.out, "the answer is the answer, and nothing else"


# -- crashes -----------------------------------------------------------------------------------------------------------


class Stop(BaseException):
    """Stands for a kill."""


class Interrupted:
    """A store whose k-th call of one verb ends the process, before or after its work."""

    def __init__(self, inner: Store, verb: str, at: int, after: bool, error: Callable[[], BaseException]) -> None:
        self.inner, self.url = inner, inner.url
        self.verb, self.left, self.after, self.error = verb, at, after, error
        self.lock = threading.Lock()

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.inner, name)

        def call(*args: Any) -> Any:
            with self.lock:  # so that nothing happens after the end
                self.left -= name == self.verb
                if self.left < 0:
                    raise self.error()
                if self.left > 0 or name != self.verb or self.after:
                    out = method(*args)
                if self.left == 0 and name == self.verb:
                    self.left = -1
                    raise self.error()
                return out

        return call


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("at", [1, 2, 5])
def test_a_crash_between_tombstone_and_last_delete_is_an_unfinished_prune_and_the_next_one_ends_it(
    root: Path, at: int, after: bool
) -> None:
    before = verify(str(root))
    ledger = open_ledger(str(root))
    total = len(segments(root))
    ledger.store = Interrupted(ledger.store, "delete", at, after, Stop)  # type: ignore[assignment]
    with pytest.raises(Stop):
        prune(ledger, RUN, ALL)
    half = verify(str(root))
    assert (half.exit_code, half.verdict) == (before.exit_code, before.verdict)
    assert "prune.unfinished" in {f.kind for f in half.findings}
    assert comparable(half.findings, ("segment.pruned", "prune.unfinished")) == list(before.findings)
    left = [r for r in open_ledger(str(root)).run(RUN).records() if r.arrays]
    assert left, "what was not deleted is still read"
    done = prune(open_ledger(str(root)), RUN, ALL)
    assert done.unfinished == done.deleted > 0
    assert len(segments(root)) == 1 < total
    assert comparable(verify(str(root)).findings) == list(before.findings)


def test_a_crash_before_the_tombstone_is_committed_changes_nothing(
    root: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    before, there = verify(str(root)), segments(root)

    def stopped(*_: Any, **__: Any) -> None:
        raise Stop

    monkeypatch.setattr("rlk_ledger.writer.ship_once", stopped)
    with pytest.raises(Stop):
        prune(open_ledger(str(root)), RUN, ALL)
    assert segments(root) == there
    assert verify(str(root)).findings == before.findings


def test_a_bucket_that_refuses_deletes_leaves_everything_and_says_it_in_one_sentence(
    root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with object lock, or without the permission."""
    before, there = verify(str(root)), segments(root)

    def refused(self: Any, path: str) -> None:
        raise StoreError(f"cannot delete {path}: AccessDenied.")

    monkeypatch.setattr("rlk_ledger.store.FileStore.delete", refused)
    assert cli.main(["prune", RUN, "--all", "--ledger", str(root)]) == 2
    said = capsys.readouterr().err
    assert f"0 of {len(there)} segments were deleted" in said
    assert "AccessDenied" in said
    assert there <= segments(root)
    after = verify(str(root))
    assert comparable(after.findings, ("prune.unfinished",)) == list(before.findings)


@pytest.mark.parametrize("after", [False, True])
def test_a_reply_that_is_lost_or_a_refusal_is_counted_as_what_really_happened(root: Path, after: bool) -> None:
    ledger, there = open_ledger(str(root)), segments(root)
    inner = ledger.store

    class Losing:
        """Every second delete fails, before or after its work."""

        url = inner.url
        calls = 0

        def __getattr__(self, name: str) -> Any:
            return getattr(inner, name)

        def delete(self, path: str) -> None:
            Losing.calls += 1
            fails = Losing.calls % 2 == 0
            if not fails or after:
                inner.delete(path)
            if fails:
                raise StoreError("503 SlowDown.")

    ledger.store = Losing()  # type: ignore[assignment]
    with pytest.raises(StoreError, match=r"(\d+) of \d+ segments were deleted, then: 503 SlowDown") as caught:
        prune(ledger, RUN, ALL)
    assert int(str(caught.value).split()[0]) == len(there - segments(root))
    left = there & segments(root)
    assert prune(open_ledger(str(root)), RUN, ALL).segments == len(left)
    assert not there & segments(root)


def test_a_segment_deleted_without_a_tombstone_is_missing_and_prune_refuses_to_hide_it(root: Path) -> None:
    victim = next(root.rglob("segment/*/*.parquet"))
    victim.unlink()
    assert verify(str(root)).exit_code == 1
    with pytest.raises(LedgerError, match="no tombstone says"):
        prune(open_ledger(str(root)), RUN, ALL)
    assert "segment.missing" in {f.kind for f in verify(str(root)).findings}
    with pytest.raises(LedgerError, match="gone"):
        list(open_ledger(str(root)).run(RUN).records())


class PrunedMeanwhile(FileStore):
    """A ledger of which everything is pruned by somebody else right before the `at`-th look at a segment."""

    def __init__(self, root: Path, at: int) -> None:
        super().__init__(root)
        self.left = at

    def open(self, path: str) -> io.FileIO:
        self.left -= "/segment/" in path
        if self.left == 0:
            prune(open_ledger(str(self.root)), RUN, ALL, by="t")
        return super().open(path)


@pytest.mark.parametrize("at", [1, 3, 9])
@pytest.mark.parametrize("covered", [False, True])
def test_a_prune_while_verify_looks_is_no_loss(root: Path, covered: bool, at: int) -> None:
    """The receipts were listed before its tombstone was there: what is gone is looked at again, not accused."""
    if covered:
        make_checkpoint(open_store(str(root)), RUN)
    store = PrunedMeanwhile(root, at)
    result = verify(store, RUN)
    assert store.left <= 0
    assert [f for f in result.findings if f.severity != "info"] == [
        f for f in verify(str(root), RUN).findings if f.severity != "info"
    ]
    assert (result.exit_code, result.pruned > 0) == (verify(str(root), RUN).exit_code, True)


def test_damage_is_evidence_and_is_not_pruned(root: Path) -> None:
    victim = sorted(root.rglob("segment/*/*.parquet"))[0]
    data = bytearray(victim.read_bytes())
    data[len(data) // 2] ^= 1
    victim.write_bytes(data)
    there = segments(root)
    with pytest.raises(LedgerError, match="Damage is evidence"):
        prune(open_ledger(str(root)), RUN, ALL)
    assert segments(root) == there


class Failing:
    """A store whose k-th call fails, before or after its work; with `at` None it only counts."""

    def __init__(self, inner: Store, at: int | None, after: bool) -> None:
        self.inner, self.url, self.at, self.after, self.calls = inner, inner.url, at, after, 0
        self.lock = threading.Lock()

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.inner, name)

        def call(*args: Any) -> Any:
            with self.lock:
                number, self.calls = self.calls, self.calls + 1
            if number == self.at and not self.after:
                raise StoreError("503 SlowDown.")
            out = list(method(*args)) if name == "list" else method(*args)
            if number == self.at:
                raise StoreError("the reply was lost.")
            return out

        return call if name != "locate" else method


def test_whatever_call_fails_the_run_verifies_as_before_and_the_next_prune_ends_it(tmp_path: Path) -> None:
    first = tmp_path / "first"
    make(first, life(A, "rollout", 1, gap=True))
    make_checkpoint(open_ledger(str(first)).store, RUN)
    before = verify(str(first))

    def attempt(root: Path, at: int | None, after: bool) -> int:
        shutil.copytree(first, root)
        ledger = open_ledger(str(root))
        failing = Failing(ledger.store, at, after)
        ledger.store = failing  # type: ignore[assignment]
        with contextlib.suppress(StoreError):
            prune(ledger, RUN, ALL)
        return failing.calls

    calls = attempt(tmp_path / "counted", None, False)
    assert calls > 20
    for at in range(calls):
        root = tmp_path / f"{at}"
        attempt(root, at, at % 2 == 0)
        half = verify(str(root))
        added = ("segment.pruned", "prune.unfinished", "receipt.uncovered")
        assert comparable(half.findings, added) == comparable(before.findings, added), at
        prune(open_ledger(str(root)), RUN, ALL)
        after = verify(str(root))
        assert comparable(after.findings, added) == comparable(before.findings, added), at
        assert len(segments(root)) <= 2, "the tombstones' own segments"
        shutil.rmtree(root)


def test_a_shipper_that_repeats_itself_after_a_prune_brings_a_segment_back_and_the_next_prune_ends_it(
    tmp_path: Path,
) -> None:
    """Its receipt stood, the reply was lost, and it offers the same bytes again: that is no attack and no loss."""
    store = open_store(str(tmp_path / "l"))
    chain = Chain(store, meet(store, RunInfo(**INFO)))
    draft = chain.draft(life(A, "rollout", 2))
    chain.publish(draft)
    prune(open_ledger(str(tmp_path / "l")), RUN, ALL)
    before = verify(str(tmp_path / "l"))
    chain.publish(draft)
    after = verify(str(tmp_path / "l"))
    assert after.exit_code == before.exit_code
    assert "prune.unfinished" in {f.kind for f in after.findings}
    assert prune(open_ledger(str(tmp_path / "l")), RUN, ALL).deleted == 1
    assert verify(str(tmp_path / "l")).findings == before.findings


def test_open_writers_are_waited_for_unless_one_says_otherwise(tmp_path: Path) -> None:
    make(tmp_path / "l", life(A, "rollout", 4)[:-1])
    with pytest.raises(LedgerError, match="1 open writers"):
        prune(open_ledger(str(tmp_path / "l")), RUN, Policy(before_step=2))
    assert prune(open_ledger(str(tmp_path / "l")), RUN, Policy(before_step=2), open_writers=True).deleted


# -- two copies of one event -------------------------------------------------------------------------------------------


def test_copies_of_a_hand_over_stay_duplicates_after_one_or_both_are_pruned(tmp_path: Path) -> None:
    records = life(A, "rollout", 6)
    make(tmp_path / "l", records, records[:9])
    before = verify(str(tmp_path / "l"))
    assert "duplicates" in {f.kind for f in before.findings}
    for policy in (Policy(before_step=3), ALL):
        prune(open_ledger(str(tmp_path / "l")), RUN, policy)
        assert comparable(verify(str(tmp_path / "l")).findings) == list(before.findings)


def test_a_fork_is_evidence_and_is_not_pruned(tmp_path: Path) -> None:
    records = life(A, "rollout", 6)
    other = event(RUN, A, records[4].seq, "logprobs", sample_id="x", source="rollout", contract_id="c", values=[-1.0])
    make(tmp_path / "l", records, [other])
    there = segments(tmp_path / "l")
    with pytest.raises(LedgerError, match="a fork is evidence"):
        prune(open_ledger(str(tmp_path / "l")), RUN, ALL)
    assert segments(tmp_path / "l") == there


# -- tombstones that lie -----------------------------------------------------------------------------------------------


def forged(root: Path, change: Callable[[dict[str, Any]], None], name: str | None = None) -> str:
    """Writes a tombstone as somebody with write access could, and deletes what it names; returns the name."""
    ledger = open_ledger(str(root))
    receipt = next(r for r in ledger.run(RUN).receipts if r.segment.name.endswith(name or ""))
    kept = [
        r.envelope
        for r in ledger.run(RUN).records()
        if any(w.writer_id == r.writer_id and w.first <= r.seq <= w.last for w in receipt.writers)
        and any(t.encode() in r.envelope for t in (*NEEDED, "contract.declared"))
    ]
    segment = receipt.segment
    entry = {"name": segment.name, "sha256": segment.sha256, "rows": segment.rows, "bytes": segment.bytes}
    entry["statements"] = kept
    change(entry)
    with ledger.writer(RUN, role="retention") as recorder:
        recorder.record("segments.pruned", segments=[entry], by="nobody", policy={})
    (root / layout.segment_path(RUN, segment.name)).unlink()
    return segment.name


def test_a_tombstone_that_describes_another_segment_excuses_nothing(root: Path) -> None:
    forged(root, lambda entry: entry.update(sha256="sha256:" + "0" * 64))
    found = verify(str(root))
    assert found.exit_code == 1
    assert {"segment.missing", "tombstone.contradicts"} <= {f.kind for f in found.findings}


def test_a_tombstone_that_leaves_out_what_verify_judges_by_excuses_nothing(root: Path) -> None:
    forged(root, lambda entry: entry.update(statements=[]))
    found = verify(str(root))
    assert {"segment.missing", "tombstone.contradicts"} <= {f.kind for f in found.findings}
    assert any("it states 0 of the 1" in f.text for f in found.findings)


def test_a_tombstone_that_states_an_event_its_segment_never_held_excuses_nothing(root: Path) -> None:
    invented = event(RUN, A, 900, "gap", kind="bulk", first=0, last=899, reason="x").envelope
    forged(root, lambda entry: entry["statements"].append(invented))
    assert any("which the segment did not hold" in f.text for f in verify(str(root)).findings)


def stated(root: Path) -> str:
    """Deletes a segment and says so in a tombstone that is right in everything, as an attacker would."""
    return forged(root, lambda entry: None)


def kinds(root: Path, **options: Any) -> dict[str, str]:
    return {f.kind: f.object for f in verify(str(root), **options).findings if f.severity != "info"}


def test_a_prune_of_a_run_with_checkpoints_is_covered_by_one_before_anything_is_deleted(root: Path) -> None:
    ledger = open_ledger(str(root))
    make_checkpoint(ledger.store, RUN)
    before = verify(str(root))
    ledger.store = Interrupted(ledger.store, "delete", 1, False, Stop)  # type: ignore[assignment]
    with pytest.raises(Stop):
        prune(ledger, RUN, ALL)
    newest = latest(open_ledger(str(root)).store, RUN)
    tombstone = next(r for r in open_ledger(str(root)).run(RUN).receipts if any(t.type == TYPE for t in r.types))
    assert newest.info.marks[tombstone.shipper] >= tombstone.n
    prune(open_ledger(str(root)), RUN, ALL)
    after = verify(str(root))
    assert comparable(after.findings, ("segment.pruned", "signature.unchecked")) == list(before.findings)


def test_deleting_a_covered_segment_behind_an_uncovered_tombstone_is_named(root: Path) -> None:
    make_checkpoint(open_ledger(str(root)).store, RUN)
    before = kinds(root)
    stated(root)
    new = {kind: object_ for kind, object_ in kinds(root).items() if kind not in before}
    assert new.keys() == {"prune.unvouched"}
    assert new["prune.unvouched"].startswith(f"runs/{RUN}/receipt/")
    assert verify(str(root)).exit_code == 3


def test_against_a_copy_kept_elsewhere_a_checkpoint_over_the_forged_tombstone_does_not_help(root: Path) -> None:
    copy = make_checkpoint(open_ledger(str(root)).store, RUN)
    before = kinds(root, checkpoints=[copy])
    stated(root)
    make_checkpoint(open_ledger(str(root)).store, RUN)
    assert "prune.unvouched" in kinds(root, checkpoints=[copy]).keys() - before.keys()
    assert "prune.unvouched" not in kinds(root), "the bucket alone cannot tell"


def test_with_a_key_only_what_it_covers_excuses_a_segment(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("cryptography")
    signer = new_key(tmp_path / "key.pem")
    make_checkpoint(open_ledger(str(root)).store, RUN, signer)
    keys = [signer.public_key]
    monkeypatch.setenv("RLK_SIGNING_KEY", str(tmp_path / "key.pem"))
    prune(open_ledger(str(root)), RUN, Policy(before_step=3))
    assert "prune.unvouched" not in kinds(root, keys=keys), "the operator's checkpoint covers his tombstone"
    monkeypatch.delenv("RLK_SIGNING_KEY")
    prune(open_ledger(str(root)), RUN, ALL)
    assert "prune.unvouched" in kinds(root, keys=keys), "an unsigned checkpoint covers nothing for who has the key"


def test_against_an_older_copy_a_tombstone_signed_by_a_key_that_the_copy_covers_excuses_a_segment(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The key signed receipts of the job before the copy was made; what it signs since then is its owner's word."""
    pytest.importorskip("cryptography")
    new_key(tmp_path / "key.pem")
    monkeypatch.setenv("RLK_SIGNING_KEY", str(tmp_path / "key.pem"))
    prune(open_ledger(str(root)), RUN, Policy(before_step=2))  # the first that the key signs
    copy = make_checkpoint(open_ledger(str(root)).store, RUN)
    prune(open_ledger(str(root)), RUN, Policy(before_step=3))
    assert "prune.unvouched" not in kinds(root, checkpoints=[copy])
    new_key(tmp_path / "strange.pem")
    monkeypatch.setenv("RLK_SIGNING_KEY", str(tmp_path / "strange.pem"))
    prune(open_ledger(str(root)), RUN, ALL)
    assert "prune.unvouched" in kinds(root, checkpoints=[copy]), "a key that came after the copy is anybody's"


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ([], "prune what?"),
        (["--all", "--before-step", "3"], "give it alone"),
        (["--older-than", "90"], "is no age"),
        (["--before-step", "-1"], "not in the range"),
    ],
)
def test_a_policy_that_says_nothing_is_a_usage_error(
    root: Path, argv: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["prune", RUN, *argv, "--ledger", str(root)]) == 2
    assert said in capsys.readouterr().err


def test_a_run_under_hash_redaction_is_pruned_without_its_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RLK_REDACTION_KEY", raising=False)
    make(tmp_path / "l", life(A, "rollout", 4), redaction="hash")
    assert prune(open_ledger(str(tmp_path / "l")), RUN, ALL).deleted
