"""Redaction hides tokens from readers; it must not make a healthy run look faulty."""

from pathlib import Path

import numpy as np
import pytest

import rlk_ledger
from rlk_ledger.audit import audit
from rlk_ledger.history import load_history

N = 16


def record_side(url: Path, role: str, redaction: str, group_repeats: bool) -> None:
    rlk_ledger.init(
        url,
        run_id="r",
        role=role,
        roles={"rollout": 1, "training": 1},
        redaction=redaction,
        spool=url / "spool",
        shipper="inline",
    )
    rng = np.random.default_rng(3)
    body = {"mode": "processed", "temperature": 1.0}
    contract = rlk_ledger.record("contract.declared", kind="logprob", version="1", body=body).contract_id
    if role == "training":
        rlk_ledger.record("weights.published", weight_version="v0", digest="sha256:00", tensor_count=1)
    for i in range(8):
        tokens, values = rng.integers(0, 99, N), (-rng.gamma(1.5, 1.0, N) - 0.05).astype(np.float32)
        if role == "rollout":
            rlk_ledger.record(
                "rollout.sample",
                sample_id=f"s{i}",
                group_id="g",
                response_token_ids=np.arange(N) if group_repeats else tokens,
                loss_mask=np.ones(N, np.uint8),
                weight_spans=[{"version": "v0", "start": 0, "end": N}],
            )
        rlk_ledger.record(
            "logprobs", sample_id=f"s{i}", source=role, values=values, contract_id=contract, weight_version="v0"
        )
    rlk_ledger.close()


@pytest.mark.parametrize(
    ("redaction", "group_repeats", "wanted"),
    [
        ("none", False, set()),
        ("hash", False, set()),
        ("drop", False, set()),
        ("none", True, {"group.duplicates"}),
        ("hash", True, {"group.duplicates"}),
        ("drop", True, set()),  # nothing is known about the tokens, so nothing is claimed
    ],
)
def test_a_redacted_run_is_accused_of_nothing_that_the_open_one_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, redaction: str, group_repeats: bool, wanted: set[str]
) -> None:
    monkeypatch.setenv("RLK_REDACTION_KEY", "0123456789abcdef")
    for role in ("rollout", "training"):
        record_side(tmp_path, role, redaction, group_repeats)
    found = {
        f.finding_id for f in audit(load_history(rlk_ledger.open(tmp_path), "r")).findings if f.severity == "error"
    }
    assert found == wanted
