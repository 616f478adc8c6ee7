"""An imported run replays: its prompts, tokens and stated numerics are enough for the reference to judge both sides."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import rlk_ledger_replay
from rlk_ledger.cli import main

from .conftest import save

MODEL = Path(rlk_ledger_replay.__file__).parent / "model"


@pytest.fixture(scope="module")
def dump(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dump of the shipped model: rollout values in bfloat16, training values in float32, a tool span in each."""
    from transformers import AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("dump")
    torch.manual_seed(0)
    models = {
        dtype: AutoModelForCausalLM.from_pretrained(MODEL, dtype=dtype).eval()
        for dtype in (torch.bfloat16, torch.float32)
    }
    rollouts, rows = [], []
    for i in range(16):
        prompt = [40 + i // 4, 101, 32]
        with torch.no_grad():
            tokens = models[torch.float32].generate(
                torch.tensor([prompt]), do_sample=True, max_new_tokens=24, min_new_tokens=24, pad_token_id=0
            )[0]
            scores = {d: torch.log_softmax(m(tokens[None]).logits[0].float(), -1) for d, m in models.items()}
        at = torch.arange(2, len(tokens) - 1)
        values = {dtype: held[at, tokens[3:]] for dtype, held in scores.items()}
        mask = [1] * 10 + [0] * 4 + [1] * 10
        ids = tokens.tolist()
        engine = [v if m else 0.0 for v, m in zip(values[torch.bfloat16].tolist(), mask, strict=True)]
        common = {"tokens": ids, "loss_mask": mask, "response_length": 24}
        rollouts.append(
            {**common, "index": i, "group_index": i // 4, "rollout_log_probs": engine, "weight_versions": ["5"]}
        )
        rows.append(
            {
                "tokens": ids,
                "sample_index": i,
                "response_lengths": 24,
                "loss_masks": torch.tensor(mask),
                "log_probs": values[torch.float32],
            }
        )
    return save(folder, rollouts, rows, step=5)


def test_the_share_of_an_imported_drift_is_the_bfloat16_sides_and_within_its_floor(
    dump: Path, tmp_path: Path, imports: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights/v5").symlink_to(MODEL)
    stated = ["temperature=1.0", "rollout.compute_dtype=bfloat16", "training.compute_dtype=float32"]
    declared = [word for text in [*stated, "training.weight_version={step}"] for word in ("--declare", text)]
    run = imports("slime", dump, *declared)["run_id"]
    weights = str(tmp_path / "weights/v{version}")
    code = main(["replay", run, "--ledger", imports.url, "--weights", weights, "--json"])
    result = json.loads(capsys.readouterr().out)
    assert all(arm["tokens"] == 16 * 20 for arm in result["arms"].values())
    means = {name: arm["metrics"]["abs_dlogp_mean"] for name, arm in result["arms"].items()}
    assert means["rollout_reference_only"] < 1e-4 < means["training_reference_only"]
    assert result["decision"] == "within_floor"
    assert result["numbers"]["share_rollout"]["low"] > 0.99
    assert {f["finding_id"] for f in result["findings"] if f["severity"] == "error"} == set()
    assert "metadata.defaulted" in {f["finding_id"] for f in result["findings"]}
    assert (code, result["verdict"]) == (3, "inconclusive")
