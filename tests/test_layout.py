"""The repository's shape: source roots stay plain folders, the facade stays light."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
HEAVY = ("torch", "numpy", "pyarrow", "duckdb", "fsspec", "transformers", "click", "rich")


@pytest.mark.parametrize("folder", ["schemas", "sdk", "rlk_ledger", "kernels", "replay", "tools", "tests"])
def test_a_source_root_is_not_a_package(folder: str) -> None:
    """A bare `kernels` package would shadow the one transformers imports."""
    assert not (ROOT / folder / "__init__.py").exists()


def loaded_after(statement: str) -> set[str]:
    code = f"import sys; {statement}; print(' '.join(m for m in {HEAVY} if m in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd="/")
    return set(done.stdout.split())


def test_importing_the_facade_pulls_in_nothing_heavy() -> None:
    assert loaded_after("import rlk_ledger") == set()


def test_recording_pulls_in_nothing_heavy(tmp_path: Path) -> None:
    statement = (
        f"import rlk_ledger; rlk_ledger.init({str(tmp_path / 'ledger')!r}, run_id='r', role='rollout', "
        f"spool={str(tmp_path / 'spool')!r}, shipper='off'); "
        "rlk_ledger.record('logprobs', sample_id='s', source='rollout', values=[-1.0], contract_id='c')"
    )
    assert loaded_after(statement) == set()


def test_the_check_would_notice() -> None:
    assert "numpy" in loaded_after("import numpy")
