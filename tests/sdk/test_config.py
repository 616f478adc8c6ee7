"""Configuration: arguments over environment over launcher over default, and one sentence for everything malformed."""

import os
import stat
import sys
import types

import pytest

from rlk_ledger_schemas.errors import ConfigError
from rlk_ledger_sdk import api, config, filesystem, init, place
from rlk_ledger_sdk.config import load_config


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"run_id": "../../etc/passwd"}, "not a name"),
        ({"run_id": "a/b"}, "not a name"),
        ({"run_id": ".."}, "not a name"),
        ({"run_id": "x" * 129}, "not a name"),
        ({"run_id": 7}, "not a name"),
        ({"role": "rolout"}, "did you mean 'rollout'"),
        ({"role": "boss"}, "use one of"),
        ({"job": {"seed": 2**70}}, "`job` cannot be stored: it holds an integer that does not fit 64 bits"),
        ({"lineage": {"run": "\ud800"}}, "lone surrogate"),
        ({"spool": "a\0b"}, "no path on this system"),
        ({"spool": "a\ud800b"}, "no path on this system"),
        ({"rank": -1}, "outside a world"),
        ({"rank": 4, "world_size": 4}, "outside a world"),
        ({"rank": "three"}, "rank must be an integer"),
        ({"rank": 1.5}, "rank must be an integer"),
        ({"rank": True, "world_size": 2}, "rank must be an integer"),
        ({"world_size": 0}, "outside a world"),
        ({"roles": {"rollout": "eight"}}, "roles"),
        ({"roles": ["rollout"]}, "roles"),
        ({"parallel": {"tp": {"rank": 0}}}, "size"),
        ({"parallel": {"xp": {"rank": 0, "size": 1}}}, "xp"),
        ({"engine": {"version": "1"}}, "name"),
        ({"mode": {"fast": "very"}}, "mode fast"),
        ({"mode": {"speed": "auto"}}, "no key 'speed'"),
        ({"mode": "strict"}, "mode must be a mapping"),
        ({"redaction": "blur"}, "use none, hash or drop"),
        ({"redaction": "hash"}, "RLK_REDACTION_KEY"),
        ({"shipper": "pigeon"}, "shipper"),
        ({"budget_bytes": 10}, "at least"),
        ({"budget_bytes": "much"}, "must be a number"),
        ({"budget_bytes": True}, "must be a number"),
        ({"block_ms": -1}, "at least 0"),
        ({"block_ms": float("inf")}, "at least 0"),
        ({"block_ms": float("nan")}, "at least 0"),
        ({"on_error": "panic"}, "on_error"),
        ({"environment": ["a"]}, "environment must be a mapping"),
        ({"revision": {"branch": "x"}}, "branch"),
        ({"spool": 3}, "spool must be a directory path"),
        ({"job": "nightly"}, "job"),
    ],
)
def test_a_malformed_option_is_one_sentence(tmp_path, options, says):
    with pytest.raises(ConfigError, match=says) as caught:
        init(str(tmp_path / "ledger"), **{"spool": tmp_path / "spool", **options})
    assert str(caught.value).startswith("init: ")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "spool").exists()


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("", "not a path or a URL"),
        ("  ", "not a path or a URL"),
        (3, "not a path or a URL"),
        (b"/tmp/x", "not a path or a URL"),
        ("s3://", "names no bucket"),
        ("s3:/bucket/x", "write 's3://bucket/x'"),
        ("s4://bucket", "unknown scheme 's4'; did you mean"),
        ("https://example.org/x", "is a server, not a bucket"),
        ("s3a:/bucket/x", "write 's3a://bucket/x'"),
        ("file:/data/x", "write 'file:///data/x'"),
        ("s3://key:secret@bucket/x", "credentials"),
        ("/tmp/a\0b", "not a path or a URL"),
        ("memory://x", "pass shipper='inline'"),
    ],
)
def test_a_malformed_url_is_one_sentence_and_never_shows_a_secret(tmp_path, url, says):
    with pytest.raises(ConfigError, match=says) as caught:
        init(url, spool=tmp_path)
    assert "secret" not in str(caught.value)


def test_an_anchor_that_no_shipper_could_reach_is_refused_before_the_job(tmp_path, monkeypatch):
    monkeypatch.setenv("RLK_ANCHOR", "s4://elsewhere/x")
    with pytest.raises(ConfigError, match="RLK_ANCHOR 's4://elsewhere/x' has the unknown scheme"):
        init(str(tmp_path / "ledger"), spool=tmp_path / "spool")


def test_an_unknown_option_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"run_ids.*did you mean 'run_id'"):
        init(str(tmp_path), run_ids="x")


def test_malformed_environment_names_its_variable(tmp_path, monkeypatch):
    monkeypatch.setenv("RLK_BUDGET_BYTES", "lots")
    with pytest.raises(ConfigError, match="RLK_BUDGET_BYTES must be a number"):
        load_config(str(tmp_path))


def test_a_path_becomes_absolute_and_a_url_stays(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert load_config("led").url == str(tmp_path / "led")
    assert load_config(tmp_path / "led").url == str(tmp_path / "led")
    assert load_config("s3://bucket/rl").url == "s3://bucket/rl"


def test_an_argument_wins_over_the_environment_and_the_launcher(tmp_path, monkeypatch):
    for name, value in {
        "RLK_LEDGER": "/env/ledger",
        "RLK_RUN_ID": "env-run",
        "RLK_ROLE": "teacher",
        "RLK_SPOOL": "/env/spool",
        "RLK_CONSISTENCY": "strict",
        "RLK_FAST": "auto",
        "RANK": "3",
        "WORLD_SIZE": "8",
    }.items():
        monkeypatch.setenv(name, value)
    got = load_config()
    assert (got.url, got.run_id, str(got.spool)) == ("/env/ledger", "env-run", "/env/spool")
    assert (got.writer_opened["role"], got.writer_opened["rank"], got.writer_opened["world_size"]) == ("teacher", 3, 8)
    assert got.run_opened["mode"] == {"fast": "auto", "consistency": "strict"}
    got = load_config("/a", run_id="arg", role="rollout", rank=0, world_size=2, mode={"consistency": "audit"})
    assert (got.url, got.run_id, got.writer_opened["role"]) == ("/a", "arg", "rollout")
    assert (got.writer_opened["rank"], got.writer_opened["world_size"]) == (0, 2)
    assert got.run_opened["mode"] == {"fast": "auto", "consistency": "audit"}


def test_torchrun_names_the_run_when_nobody_else_does(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "elastic-7")
    assert load_config("/a").run_id == "elastic-7"


def test_ray_train_names_the_rank(monkeypatch):
    context = types.SimpleNamespace(get_world_rank=lambda: 5, get_world_size=lambda: 16)
    monkeypatch.setitem(sys.modules, "ray.train", types.SimpleNamespace(get_context=lambda: context))
    got = load_config("/a").writer_opened
    assert (got["rank"], got["world_size"]) == (5, 16)
    assert load_config("/a", rank=0, world_size=1).writer_opened["rank"] == 0

    def outside():
        raise RuntimeError("not in a worker")

    monkeypatch.setitem(sys.modules, "ray.train", types.SimpleNamespace(get_context=outside))
    assert load_config("/a").writer_opened["rank"] == 0


def test_generated_run_ids_are_names_and_differ():
    one, two = load_config("/a").run_id, load_config("/a").run_id
    assert one != two
    assert config.check_run_id(one) == one


def test_errors_raise_under_tests_and_warn_in_production(monkeypatch):
    assert load_config("/a").on_error == "raise"
    monkeypatch.delenv("PYTEST_CURRENT_TEST")
    assert load_config("/a").on_error == "warn"


def test_a_spool_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be made"):
        init(str(tmp_path / "ledger"), spool=tmp_path / "file" / "spool")


def test_a_read_only_spool_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write anywhere
    with pytest.raises(ConfigError, match="not writable"):
        init(str(tmp_path / "ledger"), spool=tmp_path / "spool")


@pytest.mark.parametrize("kind", ["nfs", "fuse"])
def test_a_network_spool_is_refused_unless_asked_for_by_name(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(place, "name_of", lambda path: kind)
    with pytest.raises(ConfigError, match=f"is on {kind}.*RLK_SPOOL={kind}:"):
        init(str(tmp_path / "ledger"), spool=tmp_path / "spool")
    with pytest.raises(ConfigError, match=f"is on {kind}"):
        init(str(tmp_path / "ledger"), spool=f"cifs:{tmp_path / 'spool'}")
    opened = init(str(tmp_path / "ledger"), spool=f"{kind}:{tmp_path / 'spool'}", shipper="off")
    assert opened.enabled
    assert os.environ["RLK_SPOOL"] == f"{kind}:{tmp_path / 'spool'}"


def test_only_file_systems_that_keep_their_promise_are_mapped():
    assert [filesystem.method_for(name) for name in ("ext4", "xfs", "tmpfs")] == ["mmap"] * 3
    assert {filesystem.method_for(name) for name in ("overlay", "btrfs", "zfs", "unknown", "nfs")} == {"pwrite"}
    assert filesystem.name_of("/proc") == "unknown"


def test_the_spool_is_private(opened):
    recorder_ = opened()
    for path in (recorder_.config.spool, recorder_.directory):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
    for file in recorder_.directory.glob("*.spool"):
        assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_an_unreachable_bucket_raises_nothing(tmp_path):
    recorder_ = init("s3://no-such-bucket-anywhere/rl", spool=tmp_path, shipper="off")
    assert recorder_.record("knob.applied", path="a", requested=1, status="applied").seq is not None


def test_init_exports_what_children_need_and_close_takes_it_back(opened, monkeypatch):
    monkeypatch.setenv("RLK_ROLE", "reward")
    recorder_ = opened(run_id="r9", role="rollout")
    assert os.environ["RLK_RUN_ID"] == "r9"
    assert os.environ["RLK_ROLE"] == "rollout"
    assert os.environ["RLK_PARENT_WRITER"] == recorder_.writer_id
    api.close()
    assert "RLK_RUN_ID" not in os.environ
    assert os.environ["RLK_ROLE"] == "reward"


def test_a_failed_init_leaves_the_recorder_before_it_in_force(opened):
    first = opened()
    with pytest.raises(ConfigError):
        init("s4://x")
    assert api.current() is first


def test_secrets_of_the_environment_are_not_captured(opened, image, monkeypatch):
    monkeypatch.setenv("NVTE_FUSED_ATTN", "1")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "sesame")
    recorder_ = opened(environment={"driver": "570"})
    environment = image(recorder_).events[1].fields["environment"]
    assert environment["variables"]["NVTE_FUSED_ATTN"] == "1"
    assert environment["driver"] == "570"
    assert "sesame" not in repr(environment)
