"""What a job diagnosed and admitted, from its own process through the ledger to SQL and the audit."""

from pathlib import Path

import pytest

import rlk_ledger
from rlk_ledger.audit import audit
from rlk_ledger.history import load_history

BODY = {"mode": "processed", "temperature": 1.0, "compute_dtype": "float32"}
TOKENS = [1, 2, 3]


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A strict training loop of two steps: each batch is admitted, scored, diagnosed; returns the opened ledger."""
    for name in ("RLK_LEDGER", "RLK_RUN_ID", "RLK_CONSISTENCY", "RLK_FAST", "RLK_ON_MISSING"):
        monkeypatch.delenv(name, raising=False)

    def run(incomplete: bool, on_missing: str = "downgrade"):
        url = str(tmp_path / "ledger")
        options = {"spool": tmp_path / "spool", "shipper": "inline", "mode": {"fast": "auto", "consistency": "strict"}}
        rlk_ledger.init(url, run_id="r1", role="training", on_missing=on_missing, **options)
        contract = rlk_ledger.record("contract.declared", kind="logprob", version="1", body=BODY).contract_id
        for step in range(2):
            with rlk_ledger.scope(step=step):
                play(step, contract, incomplete and step == 1)
        rlk_ledger.close()
        return rlk_ledger.open(url)

    yield run
    rlk_ledger.close(timeout=0)


def play(step: int, contract: str, incomplete: bool) -> None:
    version, batch = f"v{step}", []
    for i in range(4):
        sample = {
            "sample_id": f"{step}-{i}",
            "prompt_token_ids": [7],
            "response_token_ids": TOKENS,
            "loss_mask": [1, 1, 0],
            "token_digest": rlk_ledger.token_digest(TOKENS),
            "sampling": {"temperature": 1.0},
            "weight_spans": [{"version": version, "start": 0, "end": 3}],
            "engine": "e0",
        }
        rlk_ledger.record("rollout.sample", **sample)
        scores = {"sample_id": sample["sample_id"], "contract_id": contract, "weight_version": version}
        rlk_ledger.record("logprobs", source="rollout", values=[-1.0, -2.0, -3.0], **scores)
        batch.append(sample | {"logprobs": [-1.0, -2.0, -3.0], "contract_id": contract})
    if incomplete:
        del batch[3]["engine"]
    known = {"kind": "logprob", "version": "1", "body": BODY}
    admitted = rlk_ledger.admit(batch, contracts=[known], contract=known)
    values = [[-1.0, -2.0 - 0.25 * (i + 1), -3.0] for i in range(len(admitted.batch))]
    for sample, row in zip(admitted.batch, values, strict=True):
        scores = {"sample_id": sample["sample_id"], "contract_id": contract, "weight_version": version}
        rlk_ledger.record("logprobs", source="training", values=row, token_digest=sample["token_digest"], **scores)
    rlk_ledger.diagnose(
        [s["logprobs"] for s in admitted.batch],
        values,
        mask=[s["loss_mask"] for s in admitted.batch],
        sample_ids=[s["sample_id"] for s in admitted.batch],
        rollout_versions=[s["weight_spans"] for s in admitted.batch],
        training_version=version,
        pass_id="p0",
        thresholds={"abs_dlogp_max": 0.5},
    )


def test_diagnostics_answer_in_sql_and_equal_what_the_ledger_computes_from_the_tokens(job):
    led = job(incomplete=False)
    rows = led.sql(
        "select step, tokens, active, off_policy, (metrics->>'abs_dlogp_mean')::double as mean, "
        "(metrics->>'abs_dlogp_max')::double as worst_size, exceeded, worst->>'sample_id' as sample, pass_id, "
        "weight_version from diagnostics where run_id = 'r1' order by step"
    ).fetchall()
    assert rows == [
        (step, 8, 8, 0, 0.3125, 1.0, '["abs_dlogp_max"]', f"{step}-3", "p0", f"v{step}") for step in range(2)
    ]
    offline = led.sql("select step, avg(abs_dlogp), max(abs_dlogp), count(*) from drift group by 1 order by 1")
    assert offline.fetchall() == [(step, 0.3125, 1.0, 8) for step in range(2)]


def test_admissions_answer_in_sql_what_left_and_why(job):
    led = job(incomplete=True, on_missing="quarantine")
    rows = led.sql(
        "select step, outcome, admitted, quarantined, mode->>'consistency', on_missing, reasons "
        "from admissions where run_id = 'r1' order by step"
    ).fetchall()
    assert rows == [
        (0, "admitted", 4, 0, "strict", "quarantine", "{}"),
        (1, "quarantined", 3, 1, "strict", "quarantine", '{"metadata_missing":1}'),
    ]
    listed = led.sql(
        "select d->'reasons'->0->>'field', d->'sample_ids'->>0 from "
        "(select unnest(from_json(decisions, '[\"json\"]')) as d from admissions)"
    ).fetchall()
    assert listed == [("engine", "1-3")]
    result = audit(load_history(led, "r1"))
    assert result.verdict == "inconclusive"
    assert {f.where.get("field") for f in result.findings} >= {"engine"}


@pytest.mark.parametrize(("incomplete", "verdict"), [(False, "pass"), (True, "inconclusive")])
def test_the_audit_of_a_strict_run_passes_only_when_strict_held(job, incomplete, verdict):
    result = audit(load_history(job(incomplete), "r1"))
    assert result.verdict == verdict, result.findings
    told = [f.evidence["reason"] for f in result.findings if f.where.get("field") == "consistency"]
    assert told == (["consistency=strict was asked for and batches were trained on under audit"] if incomplete else [])
