"""Claim: a checkpoint is read exactly or refused in one sentence that names the file, the tensor or the setting."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import blake3
import pytest
import torch
from safetensors.torch import load_file, save_file

import rlk_ledger_replay
from rlk_ledger_replay.checkpoint import (
    CheckpointError,
    UnknownArchitectureError,
    checked_tensors,
    load_checkpoint,
    parse_config,
)
from rlk_ledger_replay.decoder import Decoder

MODEL = Path(rlk_ledger_replay.__file__).parent / "model"
CONFIG: dict[str, Any] = json.loads((MODEL / "config.json").read_text())
IDS = [256, *b"def main() -> None:"]


def test_the_shipped_files_match_their_digest_and_size() -> None:
    for line in (MODEL / "DIGEST").read_text().splitlines():
        digest, name = line.split("  ")
        assert blake3.blake3((MODEL / name).read_bytes()).hexdigest() == digest, name
    assert sum(file.stat().st_size for file in MODEL.iterdir()) <= 4 * 2**20
    log = json.loads((MODEL / "training_log.json").read_text())
    assert log["held_out_nats_per_byte"] < 2.0
    assert log["parameters"] == sum(t.numel() for t in load_checkpoint(MODEL).tensors.values())


def test_loading_does_not_import_transformers() -> None:
    code = (
        "import sys; from rlk_ledger_replay.decoder import Decoder; "
        f"Decoder.load({str(MODEL)!r}).prefill_logprobs([256, 100, 101], 1); assert 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_tensors_in_memory_and_shards_score_like_the_folder(tmp_path: Path) -> None:
    expected = Decoder.load(MODEL).prefill_logprobs(IDS, 4)
    tensors = load_file(MODEL / "model.safetensors")
    assert torch.equal(Decoder.from_tensors(CONFIG, tensors).prefill_logprobs(IDS, 4), expected)
    names = sorted(tensors)
    files = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, members in files.items():
        save_file({name: tensors[name] for name in members}, tmp_path / file)
    index = {"weight_map": {name: file for file, members in files.items() for name in members}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    assert torch.equal(Decoder.load(tmp_path).prefill_logprobs(IDS, 4), expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "architecture .*GPT2LMHeadModel.* has no decoder"),
        ({"architectures": ["Qwen3NextForCausalLM"]}, "Qwen3NextForCausalLM"),
        ({"layer_types": ["chunked_attention"] * 4}, "layer type 'chunked_attention' is not implemented"),
        ({"architectures": ["LlamaForCausalLM"], "sliding_window": 8}, "sliding_window has no meaning in a llama"),
        ({"architectures": None}, "architecture none has no decoder"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not implemented"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 4.0}}, "rope scaling 'longrope' is not implemented"),
        ({"quantization_config": {"bits": 4}}, "quantised weights are not implemented"),
        ({"head_dim": 512}, "head_dim 512 is not implemented"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is not implemented"),
    ],
)
def test_what_has_no_implementation_is_refused_by_name(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UnknownArchitectureError, match=message):
        parse_config(CONFIG | change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": "big"}, "hidden_size is 'big', expected a whole number"),
        ({"vocab_size": 0}, "vocab_size is 0"),
        ({"num_hidden_layers": None}, "num_hidden_layers is None"),
        ({"num_key_value_heads": 3}, "not a multiple of num_key_value_heads 3"),
        ({"num_key_value_heads": "3"}, "num_key_value_heads is '3', expected a whole number"),
        ({"head_dim": -2}, "head_dim is -2, expected a whole number"),
        ({"head_dim": 32.0}, r"head_dim is 32\.0, expected a whole number"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps is 'small', expected a finite number above 0"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan, expected a finite number above 0"),
        ({"rope_theta": -1, "rope_parameters": None}, "rope_theta is -1, expected a finite number above 0"),
        ({"rope_parameters": "default"}, "rope_parameters is 'default', expected an object"),
        (
            {"rope_scaling": {"rope_type": "linear", "factor": None, "rope_theta": []}, "rope_parameters": None},
            "is \\[\\]",
        ),
        ({"architectures": "Qwen3ForCausalLM"}, "architectures is 'Qwen3ForCausalLM', expected a list of names"),
    ],
)
def test_a_config_without_a_valid_field_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        parse_config(CONFIG | change)


def test_tensors_that_do_not_fit_are_refused_by_name() -> None:
    config, tensors = parse_config(CONFIG), load_file(MODEL / "model.safetensors")
    norm, up = "model.norm.weight", "model.layers.2.mlp.up_proj.weight"
    cases = [
        ({k: v for k, v in tensors.items() if k != up}, f"tensor {up} is missing"),
        (tensors | {norm: torch.zeros(7)}, rf"tensor {norm} has shape \[7\], expected \[128\]"),
        (tensors | {norm: torch.zeros(128, dtype=torch.int64)}, "only floating-point weights"),
        (tensors | {"model.layers.4.extra.weight": torch.zeros(1)}, "extra.weight has no place in a qwen3 decoder"),
        (tensors | {"lm_head.weight": torch.zeros(272, 128)}, "differs from the embedding it is declared tied to"),
    ]
    for given, message in cases:
        with pytest.raises(CheckpointError, match=message):
            checked_tensors(config, given)


def test_folders_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"cannot be read .*; pass a model folder"):
        load_checkpoint(tmp_path / "absent")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="is not JSON"):
        load_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(CheckpointError, match="holds a list, expected an object"):
        load_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    with pytest.raises(CheckpointError, match=r"holds neither model\.safetensors nor"):
        load_checkpoint(tmp_path)
    (tmp_path / "model.safetensors").write_bytes((MODEL / "model.safetensors").read_bytes()[:5000])
    with pytest.raises(CheckpointError, match="cannot be read as safetensors"):
        load_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        (b"{", "is not JSON"),
        (b"\xff\xfe", "is not JSON"),
        (b"[]", "holds a list, expected an object"),
        (b"{}", "weight_map is not an object"),
        (b'{"weight_map": {"a": 1}}', "weight_map is not an object"),
        (b'{"weight_map": {"a": "absent.safetensors"}}', "cannot be read as safetensors"),
        (b'{"weight_map": {}}', "is missing; the config needs it"),
    ],
)
def test_an_index_that_names_no_shards_is_refused(tmp_path: Path, index: bytes, message: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "model.safetensors.index.json").write_bytes(index)
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(tmp_path)
