"""`doctor` looks at the real thing, says what to do, and calls nothing fine that it could not tell."""

import json
import os
import socket
import stat
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlk_ledger import cli
from rlk_ledger.contact import PutIfAbsent
from rlk_ledger.doctor import bucket, doctor, machine
from rlk_ledger.doctor import spool as spools
from rlk_ledger.doctor.bucket import check_bucket, check_url
from rlk_ledger.doctor.check import Check, exit_code, guarded
from rlk_ledger.doctor.spool import check_leftovers, check_spool, mount_of
from rlk_ledger.store import FileStore, Store
from rlk_ledger_schemas.errors import StoreError

STATES = {"ok", "note", "warn", "fail", "unknown", "skipped"}


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = cli.main(list(arguments))
    out = capsys.readouterr()
    return code, out.out, out.err


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No setting of this machine's own; the plug-ins of replay are tested with replay."""
    for name in list(os.environ):
        if name.startswith(("RLK_", "SLURM_", "PBS_", "_CONDOR")) or name == "TMPDIR":
            monkeypatch.delenv(name)
    monkeypatch.setattr("rlk_ledger.doctor.plugins", list)


def by_name(checks: Iterator[Check]) -> dict[str, Check]:
    return {check.name: check for check in checks}


def test_a_fit_machine_is_0_and_every_line_has_a_state_and_a_text(capsys, spool: Path, url: str) -> None:
    spool.chmod(0o700)
    code, out, err = run(capsys, "doctor", "--ledger", url, "--spool", str(spool), "--json")
    document = json.loads(out)
    assert (code, document["exit_code"], err) == (0, 0, "")
    rows = document["checks"]
    assert {row["section"] for row in rows} == {
        *("versions", "configuration", "spool", "leftovers", "store", "limits", "clock", "container"),
    }
    assert all(row["state"] in STATES and row["text"] for row in rows)
    assert {row["name"]: row["state"] for row in rows}["put-if-absent"] == "ok"
    code, out, _ = run(capsys, "doctor", "--ledger", url, "--spool", str(spool))
    assert code == 0
    assert out.splitlines()[-1].startswith("fit: ")
    assert "ok      put-if-absent: " in out


def test_without_a_ledger_the_store_is_skipped_and_said(capsys, spool: Path, tmp_path: Path) -> None:
    code, out, _ = run(capsys, "doctor", "--spool", str(spool))
    assert code == 0
    assert "skipped store: the store was not looked at: no ledger is named -> give --ledger URL" in out
    assert list(tmp_path.iterdir()) == [spool], "nothing was made anywhere"


@pytest.mark.parametrize(
    ("states", "code"),
    [
        (["ok", "warn", "note", "skipped"], 0),
        (["ok", "unknown"], 3),
        (["unknown", "fail", "ok"], 1),
    ],
)
def test_unknown_is_never_fine_and_a_failure_outweighs_it(states: list[Any], code: int) -> None:
    assert exit_code(Check("x", state, "text") for state in states) == code


def test_a_check_that_breaks_off_is_unknown_and_hides_nothing_before_it() -> None:
    def broken() -> Iterator[Check]:
        yield Check("first", "ok", "seen")
        raise ZeroDivisionError("by nothing")

    assert [(c.name, c.state) for c in guarded("part", broken)] == [("first", "ok"), ("part", "unknown")]


# -- spool -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "named", "state", "words"),
    [
        ("ext4", None, "ok", "on ext4"),
        ("tmpfs", None, "warn", "does not survive a restart"),
        ("overlay", None, "warn", "goes when the container is removed"),
        ("nfs", None, "fail", "cannot be trusted"),
        ("nfs", "nfs", "warn", "asked for by name"),
        ("unknown", None, "unknown", "does not know"),
    ],
)
def test_the_file_system_of_the_spool_decides(spool: Path, monkeypatch, kind, named, state, words) -> None:
    monkeypatch.setattr(spools, "name_of", lambda path: kind)
    found = by_name(check_spool(spool, named, {}))["spool place"]
    assert (found.state, words in found.text) == (state, True)


def test_a_real_tmpfs_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """/dev/shm is one on every Linux."""
    assert by_name(check_spool(Path("/dev/shm/rlk-doctor-none"), None, {}))["spool place"].state == "warn"


MOUNTS = """\
22 1 8:1 / / rw - ext4 /dev/sda1 rw
23 22 0:30 / /tmp rw - tmpfs tmpfs rw
24 22 8:1 /var/spool/slurmd/job_container/4711/.4711 /var/tmp rw - ext4 /dev/sda1 rw
25 22 8:1 /tmp/systemd-private-abc-x.service/tmp /srv/a\\040b rw - ext4 /dev/sda1 rw
"""


def test_the_mount_of_a_path_is_the_longest_one_above_it() -> None:
    assert mount_of(Path("/var/tmp/rlk-0"), MOUNTS).root.endswith("/.4711")
    assert mount_of(Path("/tmpfile"), MOUNTS).point == "/"
    assert mount_of(Path("/srv/a b/c"), MOUNTS).point == "/srv/a b"
    assert mount_of(Path("/"), "") == ("/", "/")


@pytest.mark.parametrize(
    ("path", "variables", "state", "words"),
    [
        ("/var/tmp/rlk-0", {"SLURM_JOB_ID": "4711"}, "warn", "job_container"),
        ("/srv/a b/x", {}, "warn", "private to this job"),
        ("/scratch/job1/x", {"TMPDIR": "/scratch/job1"}, "warn", "scratch folder"),
        ("/tmp/x", {}, "warn", "emptied at every boot"),
        ("/data/x", {"SLURM_JOB_ID": "4711", "TMPDIR": "/tmp"}, "ok", "nothing here says"),
    ],
)
def test_a_folder_that_ends_with_the_job_is_told(monkeypatch, path, variables, state, words) -> None:
    monkeypatch.setattr(spools, "_mounts", lambda: MOUNTS)
    (found,) = spools._private(Path(path), variables)
    assert (found.state, words in found.text) == (state, True), found


def test_a_spool_that_others_can_read_or_that_is_no_folder(spool: Path, tmp_path: Path) -> None:
    spool.chmod(0o755)
    found = by_name(check_spool(spool, None, {}))["spool access"]
    assert (found.state, found.advice) == ("warn", f"chmod 700 {spool}")
    spool.chmod(0o700)
    assert by_name(check_spool(spool, None, {}))["spool access"].state == "ok"
    (tmp_path / "file").write_text("")
    assert by_name(check_spool(tmp_path / "file", None, {}))["spool access"].state == "fail"
    made = by_name(check_spool(tmp_path / "not" / "yet", None, {}))["spool access"]
    assert (made.state, (tmp_path / "not").exists()) == ("ok", False)


def test_a_disk_smaller_than_the_budget_warns_and_a_full_one_fails(spool: Path, monkeypatch) -> None:
    assert by_name(check_spool(spool, None, {"RLK_BUDGET_BYTES": "1e6"}))["spool space"].state == "ok"
    assert by_name(check_spool(spool, None, {"RLK_BUDGET_BYTES": "1e18"}))["spool space"].state == "warn"
    monkeypatch.setattr(spools, "LEAST_FREE", 1 << 60)
    assert by_name(check_spool(spool, None, {}))["spool space"].state == "fail"


def test_the_write_probe_leaves_nothing_behind_and_finds_locks(spool: Path) -> None:
    found = by_name(check_spool(spool, None, {}))
    assert (found["spool write"].state, found["spool locks"].state) == ("ok", "ok")
    assert list(spool.iterdir()) == []


def test_a_disk_without_locks_warns_about_sidecars(spool: Path, monkeypatch) -> None:
    monkeypatch.setattr(spools, "_locks", lambda folder: False)
    assert "shareProcessNamespace" in str(by_name(check_spool(spool, None, {}))["spool locks"].advice)


def test_what_writers_left_is_counted_with_the_command_that_saves_it(new_writer, spool: Path) -> None:
    assert {c.name: c.state for c in check_leftovers(spool)} == {"shipper": "ok", "leftovers": "ok"}
    new_writer(dead=True).many(3)
    found = by_name(check_leftovers(spool))
    assert (found["leftovers"].state, found["leftovers"].advice) == ("warn", f"`rlk-ledger recover {spool}`")
    assert "3 events of 1 writers" in found["leftovers"].text
    new_writer(host="elsewhere", boot_id="other").many(2)
    found = [check for check in check_leftovers(spool) if check.state == "unknown"]
    assert ["--assume-dead" in str(check.advice) for check in found] == [True]


def test_a_live_writer_that_nobody_serves_and_a_torn_one_are_told(new_writer, spool: Path) -> None:
    new_writer().many(1)
    assert by_name(check_leftovers(spool))["shipper"].state == "warn"
    torn = new_writer(dead=True)
    torn.many(1)
    at = torn.spool.at[0]
    torn.spool._map[at + 8 : at + 12] = b"torn"
    damage = by_name(check_leftovers(spool))["damage"]
    assert (damage.state, "12 bytes are no whole event" in damage.text) == ("warn", True)


def test_a_shipper_that_serves_is_seen_and_its_last_error_told(new_writer, spool: Path) -> None:
    from rlk_ledger.service import elected
    from rlk_ledger.shipper import Shipper

    def refuse(url: str) -> Store:
        raise StoreError("the bucket is on holiday.")

    new_writer(dead=True).many(2)
    with elected(spool):
        shipper = Shipper(spool, refuse)
        shipper.cycle(flush=True)
        shipper.close()
        found = by_name(check_leftovers(spool))
    assert found["shipper"].text.startswith("a shipper serves")
    assert found["leftovers"].advice == "the shipper carries them"
    assert "on holiday" in found["shipper errors"].text


# -- store -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "url",
    [
        "s3://key:secret@bucket/x",
        "s3://AKIA@bucket/x",
        "s3://bucket/x?AWS_SECRET_ACCESS_KEY=hidden",
        "https://host/x?sig=hidden",
        "abfs://user:hidden@account/x",
        "gs://bucket/x?password=hidden",
    ],
)
def test_a_credential_in_the_url_fails_is_not_printed_and_nothing_is_contacted(url: str) -> None:
    checks = list(check_bucket(url))
    assert [check.state for check in checks] == ["fail", "skipped"]
    assert not any("hidden" in check.text or "secret" in check.text for check in checks)


@pytest.mark.parametrize("url", ["s3://bucket/x", "az://container@account/x", "/data/a:b@c", "gs://b/x?generation=1"])
def test_a_url_without_one_is_fine(url: str) -> None:
    assert check_url(url).state == "ok"


class Narrow(FileStore):
    """A store whose user lacks some rights, or that is careless or slow."""

    def __init__(self, root: Path, denied: tuple[str, ...] = (), careless: bool = False, slow_s: float = 0.0) -> None:
        super().__init__(root)
        self.denied, self.careless, self.slow_s = denied, careless, slow_s

    def _deny(self, verb: str) -> None:
        time.sleep(self.slow_s)
        if verb in self.denied:
            raise StoreError(f"cannot {verb}: Access Denied.")

    def create(self, path: str, data: bytes) -> None:
        self._deny("put")
        if self.careless:
            target = self.root / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(data)
        else:
            super().create(path, data)

    def read(self, path: str) -> bytes:
        self._deny("get")
        return super().read(path)

    def children(self, prefix: str) -> tuple[str, ...]:
        self._deny("list")
        return super().children(prefix)


@pytest.mark.parametrize(
    ("denied", "failed"),
    [(("put",), {"bucket put"}), (("list",), {"bucket list"}), (("get",), {"bucket get", "bucket put"})],
)
def test_each_right_that_is_lacking_is_named(tmp_path: Path, monkeypatch, denied, failed) -> None:
    monkeypatch.setattr(bucket, "open_store", lambda url: Narrow(tmp_path / "l", denied))
    found = by_name(check_bucket(str(tmp_path / "l")))
    assert {name for name, check in found.items() if check.state == "fail"} == failed
    assert all("Access Denied" in found[name].text for name in failed)


def test_a_store_that_ignores_put_if_absent_fails(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(bucket, "open_store", lambda url: Narrow(tmp_path / "l", careless=True))
    found = by_name(check_bucket(str(tmp_path / "l")))["put-if-absent"]
    assert (found.state, "conditional writes" in str(found.advice)) == ("fail", True)


def test_a_store_that_does_not_answer_is_given_up_on(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(bucket, "open_store", lambda url: Narrow(tmp_path / "l", slow_s=30.0))
    found = list(check_bucket(str(tmp_path / "l"), answer_s=0.05))
    assert [(c.name, c.state) for c in found[1:]] == [("bucket get", "unknown"), ("store", "fail")]


def test_a_client_that_is_not_installed_is_named_with_its_pip_command(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)
    found = list(check_bucket("s3://bucket/never"))
    assert (found[-1].state, 'pip install "rlk-ledger[s3]"' in found[-1].text) == ("fail", True)


@pytest.mark.parametrize(("there", "state"), [("2024.10.0", "fail"), ("2024.12.0", "ok"), ("2026.9.0", "ok")])
def test_a_client_that_knows_no_conditional_writes_yet_is_told(monkeypatch, there: str, state: str) -> None:
    monkeypatch.setattr(machine.importlib.metadata, "requires", lambda name: ['s3fs>=2024.12; extra == "s3"'])
    monkeypatch.setattr(machine.importlib.metadata, "version", lambda name: there)
    found = by_name(machine.check_versions("s3://bucket/x"))["store client"]
    assert found.state == state
    assert (f"{there} for s3:// is older than 2024.12" in found.text) == (state == "fail")


@pytest.mark.parametrize(
    ("offset", "state"), [(0.0, "ok"), (30.0, "warn"), (-30.0, "warn"), (3600.0, "fail"), (None, "unknown")]
)
def test_a_clock_that_differs_from_the_stores_is_told(tmp_path: Path, monkeypatch, offset, state) -> None:
    there = None if offset is None else (time.time() + offset, 1.0)
    monkeypatch.setattr(bucket, "store_clock", lambda store: there)
    assert by_name(check_bucket(str(tmp_path / "l")))["clock"].state == state


def test_a_ledger_begun_on_a_careless_store_is_told(tmp_path: Path, monkeypatch) -> None:
    from rlk_ledger import contact
    from rlk_ledger.build import build

    def ignored(store: Store) -> PutIfAbsent:
        return "ignored"

    monkeypatch.setattr(contact, "probe", ignored)
    build(str(tmp_path / "l"), "r1", [])
    monkeypatch.undo()
    assert by_name(check_bucket(str(tmp_path / "l")))["ledger"].state == "warn"


# -- machine ---------------------------------------------------------------------------------------------------------


def test_versions_are_compared_as_numbers_with_what_the_distribution_declares() -> None:
    assert machine.numbers("2.10.1rc1") == (2, 10, 1)
    found = machine._libraries(["msgspec>=0.19", "pyarrow>=9999", "nothing-of-that-name>=1", 'x>=1; extra == "y"'])
    assert found.state == "fail"
    assert "older than 9999" in found.text
    assert "nothing-of-that-name is missing" in found.text
    assert machine._libraries(["msgspec>=0.19"]).state == "ok"
    assert machine._libraries([]).state == "unknown"


def test_a_configuration_that_init_would_refuse_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    assert by_name(machine.check_configuration(None))["configuration"].state == "note"
    monkeypatch.setenv("RLK_REDACTION", "hash")
    found = by_name(machine.check_configuration("/data/l"))["configuration"]
    assert (found.state, "RLK_REDACTION_KEY" in found.text) == ("fail", True)


def test_a_mistyped_variable_is_named_with_the_one_it_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "variable" not in by_name(machine.check_configuration(None)), "no variable of ours is taken for a slip"
    monkeypatch.setenv("RLK_LEGER", "s3://bucket/x")
    found = by_name(machine.check_configuration(None))["variable"]
    assert (found.state, found.text, found.advice) == (
        "warn",
        "RLK_LEGER is set, and nothing reads it",
        "did you mean 'RLK_LEDGER'?",
    )


def test_a_signing_key_is_looked_at(tmp_path: Path) -> None:
    key = tmp_path / "key.pem"
    key.write_text("not read here")
    key.chmod(0o644)
    assert machine._signing({"RLK_SIGNING_KEY": str(key)}).state == "warn"
    key.chmod(stat.S_IRUSR | stat.S_IWUSR)
    assert machine._signing({"RLK_SIGNING_KEY": str(key)}).state == "ok"
    assert machine._signing({"RLK_SIGNING_KEY": str(tmp_path / "none")}).state == "fail"
    assert machine._signing({}).state == "note"


@pytest.mark.parametrize(
    ("limit", "values", "name", "state"),
    [
        ("RLIMIT_NOFILE", (256, 256), "open files", "warn"),
        ("RLIMIT_FSIZE", (1 << 20, 1 << 20), "file size", "fail"),
        ("RLIMIT_AS", (1 << 40, 1 << 40), "address space", "warn"),
    ],
)
def test_limits_that_get_in_the_way_are_told(monkeypatch, limit, values, name, state) -> None:
    """The process's own limits stay as they are: a test that lowered them could not raise them again."""
    real, number = machine.resource.getrlimit, getattr(machine.resource, limit)
    assert by_name(machine.check_limits())[name].state == "ok"
    monkeypatch.setattr(machine.resource, "getrlimit", lambda which: values if which == number else real(which))
    assert by_name(machine.check_limits())[name].state == state


def test_the_memory_left_to_a_container_is_told_by_both_kinds_of_groups(tmp_path: Path) -> None:
    assert machine._memory(tmp_path).state == "note"
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory" / "memory.limit_in_bytes").write_text(str(8 << 30))
    (tmp_path / "memory" / "memory.usage_in_bytes").write_text(str(1 << 30))
    assert machine._memory(tmp_path).state == "ok"
    (tmp_path / "memory.max").write_text(str(2 << 30))
    (tmp_path / "memory.current").write_text(str((2 << 30) - (100 << 20)))
    assert machine._memory(tmp_path).state == "warn"
    (tmp_path / "memory.max").write_text("max\n")
    assert machine._memory(tmp_path).state == "ok"


def test_proc_of_another_namespace_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    assert by_name(machine.check_container())["pid namespace"].state in ("ok", "note")
    monkeypatch.setattr(machine.os, "readlink", lambda path: "1")
    assert by_name(machine.check_container())["pid namespace"].state == "warn"


# -- plug-ins --------------------------------------------------------------------------------------------------------


def test_another_packages_checks_are_found_by_entry_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    info = tmp_path / "others-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: others\nVersion: 1.0\n")
    lines = "[rlk_ledger.checks]\nothers_fine = others_doctor:checks\nothers_lost = no_such_module:checks\n"
    (info / "entry_points.txt").write_text(lines)
    (tmp_path / "others_doctor.py").write_text(
        "from rlk_ledger.doctor.check import Check\n\n\ndef checks():\n    yield Check('disk', 'ok', 'spins')\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    from rlk_ledger.doctor import plugins

    found = {
        name: [(check.name, check.state) for check in guarded(name, group)]
        for name, group in plugins()
        if name.startswith("others")
    }
    assert found == {"others_fine": [("disk", "ok")], "others_lost": [("others_lost", "unknown")]}


def test_a_spool_that_is_no_path_fails_and_the_rest_is_looked_at_all_the_same() -> None:
    found = [(section, check) for section, check in doctor(None, "a\0b")]
    assert [check.state for section, check in found if section == "spool"] == ["fail"]
    assert {section for section, _ in found} >= {"versions", "limits", "container"}


def test_an_endpoint_that_is_down_does_not_hold_up_the_clock_check(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{free.getsockname()[1]}"
    assert bucket.http_clock(address) is None
