"""The query and drift commands as scripts and people use them."""

import csv
import io
import json
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rlk_ledger.cli import main


def run(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    code = main(list(args))
    out = capsys.readouterr()
    return code, out.out, out.err


def test_csv_is_a_header_and_rows_and_nothing_else(url: str, capfd: pytest.CaptureFixture[str]) -> None:
    query = "select step, count(*) n, null x, 'a,\"b' y from samples where run_id = $run group by step order by step"
    code = main(["query", query, "-p", "run=one", "--ledger", url, "--format", "csv"])
    out = capfd.readouterr().out
    assert code == 0
    assert list(csv.reader(io.StringIO(out))) == [
        ["step", "n", "x", "y"],
        *([str(s), "4", "", 'a,"b'] for s in range(3)),
    ]


def test_json_is_one_document(url: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["query", "select 1 a, [1, 2] b, 'nan'::double c", "--ledger", url, "--json"]) == 0
    assert json.loads(capfd.readouterr().out) == [{"a": 1, "b": [1, 2], "c": "NaN"}]


def test_parquet_and_arrow_round_trip(url: str, tmp_path: Path) -> None:
    query = "select sample_id, dlogp from drift where run_id = 'one' order by 1, 2"
    files = {}
    for kind in ("parquet", "arrow"):
        files[kind] = tmp_path / f"out.{kind}"
        assert main(["query", query, "--ledger", url, "--format", kind, "-o", str(files[kind])]) == 0
    table = pq.read_table(files["parquet"])
    assert len(table) == 96
    with pa.ipc.open_stream(files["arrow"]) as stream:
        assert stream.read_all()["dlogp"].to_pylist() == table["dlogp"].to_pylist()


def test_a_table_in_a_pipe_has_no_colour_and_no_cut(url: str) -> None:
    command = [sys.executable, "-m", "rlk_ledger.cli"]
    query = "select sample_id, engine, dlogp from drift where run_id = 'one' limit 3"
    code = "import sys; from rlk_ledger.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", code, "query", query, "--ledger", url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout
    assert "one-0.0" in done.stdout


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("query", "drop table x"), "append-only"),
        (("query", "select 1", "-p", "novalue"), "NAME=VALUE"),
        (("drift", "one", "--by", "phase_of_the_moon"), "was recorded"),
        (("drift", "no-such-run"), "no run"),
        (("audit", "no-such-run"), "no run"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_2(
    url: str, args: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run(capsys, *args, "--ledger", url)
    assert code == 2
    assert out == ""
    assert message in err
    assert err.count("\n") == 1


def test_drift_by_dimensions_and_the_worst_tokens(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(
        capsys, "drift", "one", "--by", "step", "--by", "engine", "--worst", "2", "--json", "--ledger", url
    )
    document = json.loads(out)
    assert code == 0
    assert document["overall"]["tokens"] == 96
    assert [(r["level"], r["tokens"]) for r in document["rows"]] == [
        ({"step": step, "engine": engine}, 16) for step in range(3) for engine in ("e0", "e1")
    ]
    assert document["rows"][-1]["metrics"]["abs_dlogp_mean"] == pytest.approx(0.03, abs=1e-6)
    assert len(document["worst"]) == 2
    for place in document["worst"]:
        assert place["step"] == 2
        for name in ("run_id", "sample_id", "position", "token_id", "engine", "weight_version", "rollout_contract"):
            assert place[name] is not None


def test_drift_by_rank_is_that_of_the_training_side(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "drift", "one", "--by", "rank", "--json", "--ledger", url)
    long, same, _ = run(capsys, "drift", "one", "--by", "training.writer.rank", "--json", "--ledger", url)
    assert (code, long) == (0, 0)
    rows, expected = json.loads(out)["rows"], json.loads(same)["rows"]
    assert [(r["level"]["rank"], r["tokens"]) for r in rows] == [
        (r["level"]["training.writer.rank"], r["tokens"]) for r in expected
    ]
    assert sum(r["tokens"] for r in rows) == 96


def test_drift_prints_for_people(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "drift", "one", "--by", "cache", "--worst", "1", "--ledger", url)
    assert code == 0
    assert out.startswith("run one: 96 compared tokens of 12 samples")
    assert "abs_dlogp_p999" in out
    assert "weight_version v2" in out.splitlines()[-1]
