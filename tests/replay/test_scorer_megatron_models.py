"""Models whose rotary embedding Megatron-core computes with constants of its own are refused, never scored wrongly."""

import importlib.resources
import json
from dataclasses import replace
from pathlib import Path

import pytest

from rlk_ledger_kernels.ops.rope.table import RopeScaling
from rlk_ledger_replay.checkpoint import ModelConfig, parse_config
from rlk_ledger_replay.scorers.megatron_model import check
from rlk_ledger_replay.scorers.protocol import Unsupported


def shipped() -> ModelConfig:
    folder = Path(str(importlib.resources.files("rlk_ledger_replay") / "model"))
    return parse_config(json.loads((folder / "config.json").read_text()))


def test_what_its_constants_express_is_taken() -> None:
    check(replace(shipped(), rope_scaling=RopeScaling("llama3", 8.0, 1.0, 4.0, 8192)), ranks=2)


@pytest.mark.parametrize(
    ("low", "high", "positions"), [(2.0, 4.0, 8192), (1.0, 8.0, 8192), (1.0, 4.0, 4096)], ids=["low", "high", "length"]
)
def test_other_constants_of_llama3_scaling_are_refused(low: float, high: float, positions: int) -> None:
    config = replace(shipped(), rope_scaling=RopeScaling("llama3", 8.0, low, high, positions))
    with pytest.raises(Unsupported, match="llama3 rope is fixed"):
        check(config, ranks=2)


def test_a_fractional_theta_is_refused() -> None:
    with pytest.raises(Unsupported, match="whole rope theta"):
        check(replace(shipped(), rope_theta=10000.5), ranks=1)
