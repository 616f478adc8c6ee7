"""The audit of a million tokens runs without torch and inside a bound on memory that a laptop has."""

import subprocess
import sys
import textwrap

import pytest

_IMPORTS = """
    import sys
    import rlk_ledger.audit, rlk_ledger.views, rlk_ledger.drift, rlk_ledger.commands.audit, rlk_ledger.commands.query
    # pandas: pyarrow takes it along with its first array wherever it is installed, and no import may build one
    heavy = [name for name in ("torch", "transformers", "triton", "scipy", "pandas") if name in sys.modules]
    assert not heavy, heavy
"""

_MILLION = """
    import resource, sys
    import numpy as np
    from rlk_ledger.audit import audit
    from rlk_ledger.history import History
    from rlk_ledger_schemas.arrays import to_array

    rng, rows, n = np.random.default_rng(0), [], 512
    def add(writer, **fields):
        arrays = {k: to_array(fields.pop(k), d, k) for k, d in (
            ("response_token_ids", "int32"), ("loss_mask", "uint8"), ("values", "float32")) if k in fields}
        rows.append((writer, len(rows), fields, arrays))
    for i in range(2048):
        step, truth = i // 128, -rng.gamma(1.2, 1.0, n)
        add("r", type="rollout.sample", sample_id=f"s{i}", step=step, group_id=f"g{i // 8}",
            response_token_ids=rng.integers(0, 99, n).astype(np.int32), loss_mask=np.ones(n, np.uint8), turn=i % 3,
            weight_spans=[{"version": f"v{step}", "start": 0, "end": n}], engine=f"e{i % 2}")
        for writer, source in (("r", "rollout"), ("t", "training")):
            noise = 0.01 * (6.0 if source == "rollout" and i % 2 else 1.0)
            add(writer, type="logprobs", sample_id=f"s{i}", step=step, source=source, contract_id="c",
                values=(truth + noise * rng.normal(size=n)).astype(np.float32), weight_version=f"v{step}")
    result = audit(History.from_events(rows))
    split = [f.where for f in result.findings if f.finding_id == "drift.split"]
    assert [(w["dimension"], w["level"]) for w in split] == [("engine", "e1")], split
    assert result.summary["active_tokens"] == 2048 * n
    assert "torch" not in sys.modules
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 2 << 20, "kilobytes"
"""


def _run(code: str) -> None:
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr


def test_the_audit_and_its_commands_import_no_torch() -> None:
    _run(_IMPORTS)


@pytest.mark.slow
def test_a_million_tokens_are_audited_without_torch() -> None:
    _run(_MILLION)
