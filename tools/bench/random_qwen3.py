"""A Qwen3 of a given size with random weights, as a Hugging Face folder: what an engine needs to be timed."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

SHIPPED = Path(__file__).resolve().parents[2] / "replay" / "rlk_ledger_replay" / "model"
"""The demo's model: 0.8 M parameters."""


def write(folder: Path, *, layers: int = 12, hidden: int = 768, vocabulary: int = 32_000) -> int:
    """Writes config.json and model.safetensors (bf16) into `folder`; returns the number of parameters."""
    heads, groups, width, inner = hidden // 64, hidden // 128, 64, 3 * hidden
    config = json.loads((SHIPPED / "config.json").read_text())
    config |= {"vocab_size": vocabulary, "hidden_size": hidden, "intermediate_size": inner, "head_dim": width}
    config |= {"num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": groups}
    config |= {"initializer_range": 0.02}
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocabulary, hidden)}
    for i in range(layers):
        layer = {
            "input_layernorm": (hidden,),
            "post_attention_layernorm": (hidden,),
            "self_attn.q_proj": (heads * width, hidden),
            "self_attn.k_proj": (groups * width, hidden),
            "self_attn.v_proj": (groups * width, hidden),
            "self_attn.o_proj": (hidden, heads * width),
            "self_attn.q_norm": (width,),
            "self_attn.k_norm": (width,),
            "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
        }
        shapes |= {f"model.layers.{i}.{name}.weight": shape for name, shape in layer.items()}
    shapes["model.norm.weight"] = (hidden,)
    draw = torch.Generator().manual_seed(11)
    tensors = {
        name: (torch.ones(shape) if len(shape) == 1 else torch.randn(shape, generator=draw) * 0.02).bfloat16()
        for name, shape in shapes.items()
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return sum(tensor.numel() for tensor in tensors.values())
