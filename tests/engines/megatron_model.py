"""A Megatron-core GPT of a Hugging Face Qwen3 folder on CPU ranks over gloo: build, load, score, learn, export.

The engine is unmodified; what a CPU needs is four shims (`use_cpu`): the current CUDA device is the CPU, moving a
tensor to it is no move, nothing is waited for, and the CUDA random state is not forked. Everything here is called by
every rank of the job, in the same order.

Legend: S positions (padded), B rows, V vocabulary entries of this rank, H hidden size.
"""

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel import random as megatron_random
from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from megatron.core.transformer.transformer_config import TransformerConfig
from safetensors.torch import load_file, save_file
from torch import Tensor

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class _NoFork:
    """A tracker of CUDA random states where there is no CUDA: nothing to fork, nothing to keep."""

    @contextlib.contextmanager
    def fork(self, name: str = "") -> Iterator[None]:
        yield


def use_cpu() -> None:
    """Lets Megatron-core run on a CPU: its questions about CUDA get the CPU's answer."""
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value]
    torch.cuda.synchronize = lambda *device: None  # type: ignore[assignment]
    Tensor.cuda = lambda self, *place, **how: self  # type: ignore[method-assign,assignment]
    megatron_random._CUDA_RNG_STATE_TRACKER = _NoFork()
    megatron_random._CUDA_RNG_STATE_TRACKER_INITIALIZED = True


def start(rank: int, world_size: int, store: str | Path, *, tp: int = 1, pp: int = 1) -> None:
    """Joins the job whose ranks meet in the file `store`, and builds Megatron's process groups."""
    torch.set_num_threads(1)
    use_cpu()
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp)


def stop() -> None:
    """Leaves the job; every rank waits for the others first."""
    dist.barrier()
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def hf_config(folder: str | Path) -> dict[str, Any]:
    """The config.json of a Hugging Face folder."""
    return dict(json.loads((Path(folder) / "config.json").read_text()))


def build(folder: str | Path, dtype: str = "bfloat16", *, vocab: int | None = None, **overrides: Any) -> GPTModel:
    """This rank's stage of the model in `folder`, with its weights; `vocab` pads the vocabulary to so many entries."""
    hf = hf_config(folder)
    params = DTYPES[dtype]
    config = TransformerConfig(
        num_layers=hf["num_hidden_layers"],
        hidden_size=hf["hidden_size"],
        num_attention_heads=hf["num_attention_heads"],
        num_query_groups=hf["num_key_value_heads"],
        kv_channels=hf["head_dim"],
        ffn_hidden_size=hf["intermediate_size"],
        normalization="RMSNorm",
        layernorm_epsilon=hf["rms_norm_eps"],
        qk_layernorm=True,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        add_qkv_bias=bool(hf.get("attention_bias")),
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        perform_initialization=False,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        params_dtype=params,
        pipeline_dtype=params,
        bf16=dtype == "bfloat16",
        deterministic_mode=False,
        tensor_model_parallel_size=parallel_state.get_tensor_model_parallel_world_size(),
        pipeline_model_parallel_size=parallel_state.get_pipeline_model_parallel_world_size(),
        **overrides,
    )
    spec = get_gpt_layer_local_spec(qk_layernorm=True, normalization="RMSNorm")
    model = GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=vocab or hf["vocab_size"],
        max_sequence_length=hf["max_position_embeddings"],
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        parallel_output=True,
        share_embeddings_and_output_weights=bool(hf["tie_word_embeddings"]),
        position_embedding_type="rope",
        rotary_base=int(hf["rope_theta"]),
    ).to(params)
    load(model, folder)
    return model


# -- weights: Hugging Face names in, Hugging Face names out -----------------------------------------------------------


def _tp() -> tuple[int, int]:
    """This rank's place among the tensor-parallel ranks, and how many there are."""
    return parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_tensor_model_parallel_world_size()


def load(model: GPTModel, folder: str | Path) -> None:
    """Copies this rank's share of the tensors in `folder` into the model; raises KeyError for one without a source."""
    tensors = load_file(Path(folder) / "model.safetensors")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(_local(model, name, tensors, parameter))


def _local(model: GPTModel, name: str, hf: Mapping[str, Tensor], parameter: Tensor) -> Tensor:
    rank, size = _tp()
    source, kind = _source(model, name)
    if kind == "vocab":
        whole = hf[source[0] if source[0] in hf else "model.embed_tokens.weight"]
        padded = torch.zeros(parameter.shape[0] * size, whole.shape[1], dtype=whole.dtype)
        padded[: len(whole)] = whole
        return padded.chunk(size)[rank]
    if kind == "qkv":
        return _fuse_qkv(model, [hf[one] for one in source]).chunk(size)[rank]
    if kind == "gate_up":
        return torch.cat([hf[one].chunk(size)[rank] for one in source])
    if kind == "row":
        return hf[source[0]].chunk(size, dim=1)[rank]
    return hf[source[0]]


def _source(model: GPTModel, name: str) -> tuple[list[str], str]:
    """The Hugging Face tensors a parameter is made of, and how."""
    if name.startswith(("embedding.word_embeddings", "output_layer")):
        return (["model.embed_tokens.weight" if name.startswith("embedding") else "lm_head.weight"], "vocab")
    if name == "decoder.final_layernorm.weight":
        return ["model.norm.weight"], "whole"
    _, _, index, rest = name.split(".", 3)
    offset = model.decoder.layers[0].layer_number - 1
    prefix = f"model.layers.{int(index) + offset}."
    table = {
        "input_layernorm.weight": (["input_layernorm"], "whole"),
        "pre_mlp_layernorm.weight": (["post_attention_layernorm"], "whole"),
        "self_attention.q_layernorm.weight": (["self_attn.q_norm"], "whole"),
        "self_attention.k_layernorm.weight": (["self_attn.k_norm"], "whole"),
        "self_attention.linear_qkv.weight": ([f"self_attn.{one}_proj" for one in "qkv"], "qkv"),
        "self_attention.linear_proj.weight": (["self_attn.o_proj"], "row"),
        "mlp.linear_fc1.weight": (["mlp.gate_proj", "mlp.up_proj"], "gate_up"),
        "mlp.linear_fc2.weight": (["mlp.down_proj"], "row"),
    }
    names, kind = table[rest]
    return [f"{prefix}{one}.weight" for one in names], kind


def _fuse_qkv(model: GPTModel, parts: Sequence[Tensor]) -> Tensor:
    """[q of group 0, k, v, q of group 1, ...]: Megatron keeps the heads of a query group together."""
    config = model.config
    groups, width = config.num_query_groups, config.kv_channels
    rows = [one.view(groups, -1, width, one.shape[-1]) for one in parts]
    return torch.cat(rows, dim=1).reshape(-1, parts[0].shape[-1])


def _split_qkv(model: GPTModel, fused: Tensor) -> list[Tensor]:
    config = model.config
    per_group = config.num_attention_heads // config.num_query_groups
    rows = fused.view(config.num_query_groups, per_group + 2, config.kv_channels, fused.shape[-1])
    return [part.reshape(-1, fused.shape[-1]) for part in rows.split([per_group, 1, 1], dim=1)]


def export(
    model: GPTModel, source: str | Path, target: str | Path, dtype: torch.dtype | None = None
) -> dict[str, Tensor] | None:
    """Writes the job's weights as a Hugging Face folder at `target` (rank 0 does; the folder appears whole).

    Returns the tensors on rank 0, None elsewhere. The config comes from `source`. dtype: what to write them in, when
    it is not the model's. Gathers over all ranks.
    """
    gathered: list[Any] = [None] * dist.get_world_size()
    place = (parallel_state.get_pipeline_model_parallel_rank(), _tp()[0])
    mine = {name: (_source(model, name), p.detach()) for name, p in model.named_parameters()}
    dist.all_gather_object(gathered, (place, mine))
    if dist.get_rank() != 0:
        return None
    tensors: dict[str, Tensor] = {}
    for stage in sorted({place[0] for place, _ in gathered}):
        shards = [held for place, held in sorted(gathered, key=lambda one: one[0]) if place[0] == stage]
        for name, (origin, _) in shards[0].items():
            tensors |= _whole(model, origin, [held[name][1] for held in shards])
    hf = hf_config(source)
    if hf["tie_word_embeddings"]:
        tensors.pop("lm_head.weight", None)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        if name in tensors:
            tensors[name] = tensors[name][: hf["vocab_size"]].contiguous()
    tensors = {name: tensor.to(dtype or tensor.dtype) for name, tensor in tensors.items()}
    target = Path(target)
    scratch = target.with_name(f".{target.name}.part")
    scratch.mkdir(parents=True)
    (scratch / "config.json").write_bytes((Path(source) / "config.json").read_bytes())
    save_file(tensors, scratch / "model.safetensors", metadata={"format": "pt"})
    scratch.replace(target)
    return tensors


def _whole(model: GPTModel, origin: tuple[list[str], str], shards: list[Tensor]) -> dict[str, Tensor]:
    names, kind = origin
    if kind == "qkv":
        return {n: t.contiguous() for n, t in zip(names, _split_qkv(model, torch.cat(shards)))}
    if kind == "gate_up":
        halves = [shard.chunk(2) for shard in shards]
        return {name: torch.cat([half[i] for half in halves]) for i, name in enumerate(names)}
    joined = {"vocab": 0, "row": 1}.get(kind)
    return {names[0]: (shards[0] if joined is None else torch.cat(shards, dim=joined)).clone().contiguous()}


# -- one batch through the engine's own forward -----------------------------------------------------------------------


@dataclass(frozen=True)
class Batch:
    """Right-padded rows: `ids` [B, S], prompt and response lengths a row."""

    ids: Tensor
    prompts: list[int]
    responses: list[int]

    @property
    def rows(self) -> list[list[int]]:
        """The token ids of every row without its padding."""
        return [row[: p + r] for row, p, r in zip(self.ids.tolist(), self.prompts, self.responses)]


def pad(prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]], fill: int, multiple: int = 1) -> Batch:
    """The rows prompt + response, padded on the right to a width that is a multiple of `multiple`."""
    rows = [[*p, *r] for p, r in zip(prompts, responses)]
    width = -(-max(map(len, rows)) // multiple) * multiple
    ids = torch.tensor([row + [fill] * (width - len(row)) for row in rows])
    return Batch(ids, [len(p) for p in prompts], [len(r) for r in responses])


def forward(model: Any, batch: Batch) -> Tensor:
    """This rank's logits [B, S, V] of a batch, or its stage's hidden states [S, B, H] before the last pipeline stage.

    The model may be wrapped (Float16Module, DistributedDataParallel). Megatron's own pipeline schedules allocate on
    the device "cuda", so the stages hand on their activations here.
    """
    rows, width = batch.ids.shape
    inner = unwrapped(model)
    if not parallel_state.is_pipeline_first_stage():
        hidden = torch.empty(width, rows, inner.config.hidden_size, dtype=inner.config.pipeline_dtype)
        dist.recv(hidden, parallel_state.get_pipeline_model_parallel_prev_rank())
        inner.set_input_tensor(hidden.requires_grad_())
    positions = torch.arange(width).expand(rows, width)
    later = torch.ones(width, width, dtype=torch.bool).triu(1)[None, None]
    out: Tensor = model(input_ids=batch.ids, position_ids=positions, attention_mask=later)
    if not parallel_state.is_pipeline_last_stage():
        dist.send(out.detach().contiguous(), parallel_state.get_pipeline_model_parallel_next_rank())
    return out


def unwrapped(model: Any) -> GPTModel:
    """The GPTModel inside a wrapper."""
    while hasattr(model, "module"):
        model = model.module
    return model  # type: ignore[no-any-return]


def logprobs_of(logits: Tensor, batch: Batch, temperature: float) -> list[Tensor]:
    """Log-probabilities [response] (nats, float32) of every row, by Megatron's vocabulary-parallel cross entropy."""
    following = torch.cat([batch.ids[:, 1:], torch.zeros_like(batch.ids[:, :1])], dim=1)
    scaled = logits.float() / temperature
    loss = vocab_parallel_cross_entropy(scaled.transpose(0, 1).contiguous(), following.transpose(0, 1).contiguous())
    values = -loss.transpose(0, 1)
    return [values[i, p - 1 : p - 1 + r] for i, (p, r) in enumerate(zip(batch.prompts, batch.responses))]


def score(model: Any, batch: Batch, temperature: float = 1.0) -> list[Tensor]:
    """Log-probabilities [response] (nats, float32) of every row, without gradients; [] before the last stage."""
    with torch.no_grad():
        out = forward(model, batch)
        return logprobs_of(out, batch, temperature) if parallel_state.is_pipeline_last_stage() else []


class Learner:
    """One policy-gradient step at a time: AdamW on float32 master weights, rounded into the model's parameters."""

    def __init__(self, model: Any, learning_rate: float = 1e-3) -> None:
        self.model = model
        self._parameters = list(model.parameters())
        self._masters = [p.detach().float().clone().requires_grad_() for p in self._parameters]
        self._optimiser = torch.optim.AdamW(self._masters, lr=learning_rate, weight_decay=0.0)

    def backward(self, batch: Batch, gains: Sequence[float], temperature: float = 1.0) -> float:
        """Adds the gradient of -sum(gain x logprob) / tokens over one micro-batch; returns the loss (nats).

        Pipeline stages before the last return 0.
        """
        out = forward(self.model, batch)
        if not parallel_state.is_pipeline_last_stage():
            gradient = torch.empty_like(out)
            dist.recv(gradient, parallel_state.get_pipeline_model_parallel_next_rank())
            out.backward(gradient)  # type: ignore[no-untyped-call]
            self._hand_back()
            return 0.0
        values = logprobs_of(out, batch, temperature)
        tokens = sum(batch.responses)
        loss = -torch.stack([row.sum() * gain for row, gain in zip(values, gains)]).sum() / tokens
        loss.backward()  # type: ignore[no-untyped-call]
        self._hand_back()
        return float(loss.detach())

    def _hand_back(self) -> None:
        """Gives the stage before this one the gradient of what it handed on."""
        if not parallel_state.is_pipeline_first_stage():
            hidden = unwrapped(self.model).decoder.input_tensor
            dist.send(hidden.grad.contiguous(), parallel_state.get_pipeline_model_parallel_prev_rank())

    def step(self) -> None:
        """One optimiser step with what was accumulated.

        Query and key norms are replicated, but each tensor rank saw its own heads: their gradients are summed. So are
        those of a tied embedding that two pipeline stages hold.
        """
        inner = unwrapped(self.model)
        if inner.share_embeddings_and_output_weights and parallel_state.get_pipeline_model_parallel_world_size() > 1:
            tied = inner.shared_embedding_or_output_weight().grad
            dist.all_reduce(tied, group=parallel_state.get_embedding_group())
        for name, parameter in self.model.named_parameters():
            if name.endswith(("q_layernorm.weight", "k_layernorm.weight")) and parameter.grad is not None:
                dist.all_reduce(parameter.grad, group=parallel_state.get_tensor_model_parallel_group())
        for master, parameter in zip(self._masters, self._parameters):
            master.grad = None if parameter.grad is None else parameter.grad.float()
            parameter.grad = None
        self._optimiser.step()
        with torch.no_grad():
            for master, parameter in zip(self._masters, self._parameters):
                parameter.copy_(master)
