"""The network both engines run: Qwen3 of transformers in bf16, its weights in and out, logits at chosen positions.

Legend: B rows of a batch, T positions, H hidden size, V vocabulary.
"""

import inspect
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from rlk_ledger_replay.demo.settings import Numerics

BODY_DTYPE = torch.bfloat16
TIED = "lm_head.weight"
"""The head is the embedding under another name: an alias is neither stored nor digested."""

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def open_network(folder: str | Path) -> Any:
    """The model in `folder` in bf16 on the CPU, in eval mode (no dropout exists), without any network access."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    from transformers import Qwen3ForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    network = Qwen3ForCausalLM.from_pretrained(str(folder), dtype=BODY_DTYPE, attn_implementation="sdpa")
    return network.eval()


def cache_keyword(network: Any) -> str:
    """What this transformers release calls the KV cache argument."""
    names = inspect.signature(network.model.forward).parameters
    return "cache" if "cache" in names else "past_key_values"


def held_tensors(network: Any) -> dict[str, Tensor]:
    """The parameters the network holds now, by canonical (Hugging Face) name, aliases left out."""
    return {name: tensor.detach() for name, tensor in network.state_dict().items() if name != TIED}


def save_weights(network: Any, config_from: Path, folder: Path) -> None:
    """Writes a Hugging Face folder (config.json, model.safetensors) that appears whole, by rename."""
    scratch = folder.with_name(f".{folder.name}.{os.getpid()}")
    scratch.mkdir(parents=True)
    shutil.copyfile(config_from / "config.json", scratch / "config.json")
    save_file(held_tensors(network), scratch / "model.safetensors", metadata={"format": "pt"})
    scratch.replace(folder)


def copy_weights(network: Any, folder: Path) -> None:
    """Copies the tensors of `folder` into the live parameters; raises KeyError when the names are not the same."""
    received = load_file(folder / "model.safetensors")
    held = held_tensors(network)
    if received.keys() != held.keys():
        raise KeyError(f"{folder} and the network disagree about {sorted(received.keys() ^ held.keys())}")
    for name, tensor in held.items():
        tensor.copy_(received[name])


def log_softmax(network: Any, hidden: Tensor, numerics: Numerics) -> Tensor:
    """Log-probabilities [..., V] in the side's head dtype from hidden states [..., H], at its temperature."""
    dtype = DTYPES[numerics.head_dtype]
    logits = torch.nn.functional.linear(hidden.to(dtype), network.lm_head.weight.to(dtype))
    return torch.log_softmax(logits / numerics.temperature, dim=-1)
