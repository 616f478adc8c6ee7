"""The command: importing twice adds nothing, a refused file leaves nothing, and every mistake is one sentence."""

import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from rlk_ledger.cli import main
from rlk_ledger.ledger import open_ledger
from rlk_ledger.verify import verify

from .conftest import rollout, save, trained

FORMATS = {"slime": "slime", "vime": "vime", "miles": "miles", "prime-rl": "prime-rl", "nemo-rl": "nemo-rl"}
HOSTILE = {
    "length-lies.pt": "`rollout_log_probs` has 37 entries for 40 tokens",
    "pickle.pt": "it is a bare pickle, not the zip file that torch.save writes, and asks for 'builtins.print'",
    "reduce.pt": "'builtins.print'",
    "truncated.pt": "cut off or damaged",
}


def events(imports: Any, run_id: str) -> int:
    return sum(1 for _ in open_ledger(imports.url).read_events(run_id))


@pytest.mark.parametrize("form", FORMATS)
def test_importing_the_same_files_again_adds_nothing(form: str, data: Path, imports: Any) -> None:
    first = imports(form, data / form)
    before = events(imports, first["run_id"])
    again = imports(form, data / form)
    assert again["run_id"] == first["run_id"]
    assert (again["samples"], again["logprobs"], again["already_there"]) == (0, {}, 8 + sum(first["logprobs"].values()))
    assert again["findings"] == first["findings"]
    assert events(imports, first["run_id"]) == before
    assert verify(imports.url, deep=True).verdict == "intact"


def test_files_imported_one_by_one_come_to_what_the_folder_comes_to(data: Path, imports: Any) -> None:
    for file in sorted((data / "miles").rglob("*.pt"), key=lambda path: "train" in str(path)):
        imports("miles", file, "--run-id", "pieces")
    whole = imports("miles", data / "miles")["run_id"]
    left, right = imports.history("pieces"), imports.history(whole)
    assert {(s.sample_id, s.token_digest, s.group_id) for s in left.samples} == {
        (s.sample_id, s.token_digest, s.group_id) for s in right.samples
    }
    assert {(s.sample_id, s.source, s.values.tobytes()) for s in left.scores} == {
        (s.sample_id, s.source, s.values.tobytes()) for s in right.scores
    }
    assert len(left.scores) == len(right.scores) == 16


def test_a_cut_import_is_completed_by_running_it_again(tmp_path: Path, imports: Any) -> None:
    folder = save(tmp_path / "d", [rollout()], [trained()])
    imports("slime", folder, "--run-id", "r")
    save(folder, [rollout(), rollout(index=1, tokens=[1, 2, 3, 4, 6])], [trained()])
    again = imports("slime", folder, "--run-id", "r")
    assert (again["samples"], again["logprobs"], again["already_there"]) == (1, {"rollout": 1}, 3)


def test_dumps_of_another_run_are_refused(tmp_path: Path, imports: Any) -> None:
    imports("slime", save(tmp_path / "a", [rollout()], [trained()]), "--run-id", "r")
    other = save(tmp_path / "b", [rollout(tokens=[1, 2, 3, 4, 6])])
    assert "other tokens for sample 7-0" in imports.refused("slime", other, "--run-id", "r")
    other = save(tmp_path / "c", [rollout(rollout_log_probs=[-0.5, -1.0])])
    assert "other rollout values for sample 7-0" in imports.refused("slime", other, "--run-id", "r")


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("form", ["slime", "vime", "miles"])
def test_hostile_files_are_one_sentence_and_nothing_in_them_runs(
    form: str, name: str, data: Path, imports: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[Any] = []
    monkeypatch.setattr("builtins.print", lambda *args, **_: ran.append(args))
    told = imports.refused(form, data / "hostile" / name)
    assert HOSTILE[name] in told
    assert name in told
    assert "EXECUTED" not in told
    assert ran == []


@pytest.mark.parametrize("name", HOSTILE)
def test_one_hostile_file_among_good_ones_keeps_all_of_them_out(name: str, dumps: Path, imports: Any) -> None:
    shutil.copy(dumps / "hostile" / name, dumps / "slime/rollout_data/4.pt")
    assert "rollout_data/4.pt: " in imports.refused("slime", dumps / "slime")
    assert imports.runs() == []
    assert not Path(imports.url).exists()


def test_an_event_that_cannot_be_stored_leaves_nothing_behind(tmp_path: Path, imports: Any) -> None:
    good = [rollout(index=i, tokens=[1, 2, 3, 4, i]) for i in range(5)]
    bad = rollout(index=9, weight_versions=["\ud800"])
    assert "surrogate" in imports.refused("slime", save(tmp_path / "d", [*good, bad]))
    assert imports.runs() == []


def test_an_import_that_is_stopped_while_it_writes_leaves_nothing_behind(
    data: Path, imports: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rlk_ledger.importers import writing

    sizes = iter(range(1000))
    real = writing._size

    def stop(emit: Any) -> int:
        if next(sizes) > 40:
            raise KeyboardInterrupt
        return real(emit)

    monkeypatch.setattr(writing, "_size", stop)
    code, out, error = imports.run("slime", data / "slime")
    assert (code, out, error) == (130, "", "rlk-ledger: stopped.\n")
    assert imports.runs() == []
    monkeypatch.undo()
    assert imports("slime", data / "slime")["samples"] == 8


@pytest.mark.parametrize("form", ["slime", "miles", "prime-rl", "nemo-rl"])
def test_damaged_dumps_are_imported_whole_or_refused_in_one_sentence(form: str, dumps: Path, imports: Any) -> None:
    random_ = random.Random(form)
    files = sorted(p for p in (dumps / form).rglob("*") if p.suffix in (".pt", ".jsonl"))
    originals = {path: path.read_bytes() for path in files}
    expected = {
        (s.sample_id, s.source): s.values.tobytes()
        for s in imports.history(imports(form, dumps / form)["run_id"]).scores
    }
    refused = 0
    for number in range(60):
        path = files[number % len(files)]
        damaged = bytearray(originals[path])
        if number % 3 == 0:
            del damaged[random_.randrange(len(damaged)) :]
        else:
            damaged[random_.randrange(len(damaged))] ^= 1 << random_.randrange(8)
        path.write_bytes(damaged)
        run = f"damaged-{number}"
        code, out, error = imports.run(form, dumps / form, "--run-id", run)
        path.write_bytes(originals[path])
        assert "Traceback" not in out + error
        assert "internal error" not in error
        if code == 2:
            refused += 1
            assert error.count("\n") == 1
            assert run not in imports.runs()
        elif form in ("slime", "miles"):  # every byte that matters is under a checksum; JSON has none
            got = {(s.sample_id, s.source): s.values.tobytes() for s in imports.history(run).scores}
            assert got == expected
    assert refused > 20
    assert verify(imports.url).verdict == "intact"


@pytest.mark.parametrize("redaction", ["hash", "drop"])
def test_a_redacted_import_is_imported_once_too(
    redaction: str, data: Path, imports: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLK_REDACTION", redaction)
    monkeypatch.setenv("RLK_REDACTION_KEY", "k" * 32)
    first = imports("slime", data / "slime")
    assert imports("slime", data / "slime")["already_there"] == 24
    history = imports.history(first["run_id"])
    assert history.redaction == redaction
    assert all(s.response_token_ids.dtype != "int32" or not len(s.response_token_ids) for s in history.samples)
    result = imports.audit(first["run_id"])
    said = {("tokens.redacted", None)} if redaction == "drop" else set()
    assert {(f.finding_id, f.where.get("field")) for f in result.findings} == {
        ("evidence.incomplete", "weight_version"),
        *said,
    }
    assert result.summary["compared_tokens"] == 248


def test_a_file_that_changes_while_it_is_read_is_refused(
    dumps: Path, imports: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rlk_ledger.importers import nemo_rl

    path = dumps / "nemo-rl/train_data_step3.jsonl"
    real = nemo_rl.lines

    def growing(source: Any) -> Any:
        yield from real(source)
        with path.open("a") as stream:
            stream.write("\n")

    monkeypatch.setattr(nemo_rl, "lines", growing)
    assert "it changed while it was read" in imports.refused("nemo-rl", path)


def test_usage_is_answered_in_one_sentence(data: Path, imports: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert "neither a file nor a folder" in imports.refused("slime", data / "nothing")
    assert "holds no file called *.pt" in imports.refused("slime", data / "nemo-rl")
    assert "holds no file called rank_*.jsonl" in imports.refused("prime-rl", data / "slime")
    assert "run id" in imports.refused("slime", data / "slime", "--run-id", "a/b")
    assert "NAME=VALUE" in imports.refused("slime", data / "slime", "--declare", "temperature")
    assert "NAME=VALUE" in imports.refused("slime", data / "slime", "--declare", "Temp=1")
    for slip, meant in (("temperatur=1.0", "temperature"), ("training.head_dtypes=float32", "head_dtype")):
        assert f"did you mean {meant!r}?" in imports.refused("slime", data / "slime", "--declare", slip)
    assert "schema_version" in imports.refused("prime-rl", data / "nemo-rl/train_data_step3.jsonl")
    assert main(["import", "verl", str(data), "--ledger", imports.url]) == 2
    assert "'verl' is not one of" in capsys.readouterr().err
    assert main(["import", "slime", str(data / "slime")]) == 2
    assert "which ledger?" in capsys.readouterr().err


def test_a_file_that_is_no_dump_is_refused_when_named_and_left_out_of_a_folder(
    tmp_path: Path, data: Path, imports: Any
) -> None:
    import torch

    torch.save({"step": torch.zeros(1)}, tmp_path / "other.pt")
    assert "no rollout or train dump" in imports.refused("slime", tmp_path / "other.pt")
    assert "none of its 1 files" in imports.refused("slime", tmp_path)
    torch.save({"format_version": 3, "rollout_id": 1, "samples": []}, tmp_path / "newer.pt")
    assert "`format_version` is 3" in imports.refused("slime", tmp_path / "newer.pt")


def test_what_is_stated_enters_the_contracts_and_is_labelled(data: Path, imports: Any) -> None:
    stated = ("--declare", "temperature=0.7", "--declare", "training.compute_dtype=bfloat16")
    run = imports("nemo-rl", data / "nemo-rl", *stated, "--declare", "weight_version=w{step}")["run_id"]
    contracts = {}
    for _, _, fields, _ in open_ledger(imports.url).read_events(run, {"contract.declared"}):
        contracts[fields["contract_id"]] = (fields["body"], fields["labels"])
    history = imports.history(run)
    bodies = {s.source: contracts[s.contract_id] for s in history.scores}
    assert bodies["rollout"][0] == {"alignment": "token_i_given_before_i", "temperature": 0.7}
    assert bodies["training"][0]["compute_dtype"] == "bfloat16"
    assert bodies["training"][1] == {"derived": "alignment", "declared": "compute_dtype,temperature"}
    assert {s.weight_spans[0][0] for s in history.samples} == {"w3"}
    assert {s.metadata_source["weight_spans"] for s in history.samples} == {"defaulted"}


def test_what_is_stated_after_the_import_is_not_lost_in_silence(data: Path, imports: Any) -> None:
    imports("slime", data / "slime", "--run-id", "s")
    code, out, _ = imports.run("slime", data / "slime", "--run-id", "s", "--declare", "training.weight_version={step}")
    assert code == 0
    assert "--declare states nothing of what is there already; import under another --run-id" in out


def test_people_are_told_what_was_imported_and_what_is_missing(dumps: Path, imports: Any) -> None:
    (dumps / "miles/train_data/3_1.pt").unlink()
    code, out, error = imports.run("miles", dumps / "miles", "--run-id", "m")
    assert (code, error) == (3, "")
    assert "imported 8 samples (260 response tokens) and 8 rollout, 4 training log-probability events" in out
    assert "gap: evidence.incomplete - not every sample of the step has training values" in out
    assert f"`rlk-ledger audit m --ledger {imports.url}`" in out
    code, out, _ = imports.run("miles", dumps / "miles", "--run-id", "m")
    assert (code, "nothing was added" in out) == (3, True)


def test_findings_of_an_import_are_recorded_once(dumps: Path, imports: Any) -> None:
    (dumps / "miles/train_data/3_1.pt").unlink()
    for _ in range(2):
        run = imports("miles", dumps / "miles")["run_id"]
    rows = open_ledger(imports.url).sql("select finding_id, subject from findings where run_id = $run", {"run": run})
    assert rows.arrow().to_pylist() == [{"finding_id": "evidence.incomplete", "subject": "import"}]
