"""A small job with slime's (and vime's) own shape: its Sample, its rollout loop, its trainer, its hook signatures.

Field lists and call sites are those of THUDM/slime and vllm-project/vime, main, autumn 2026: slime/utils/types.py,
slime/rollout/sglang_rollout.py, slime/ray/rollout.py, slime/backends/megatron_utils/{actor,data,loss,cp_utils}.py. The
policy is a table of logits; a weight version is a seed of it.
"""

import asyncio
import copy
import importlib
import inspect
from dataclasses import dataclass, field
from enum import Enum
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

VOCAB = 64
NOISE = 0.01  # what a low-precision engine adds to a log-probability, nats


@dataclass
class SpecInfo:
    spec_accept_token_num: int = 0
    spec_draft_token_num: int = 0
    spec_verify_ct: int = 0
    completion_token_num: int = 0


@dataclass
class PrefixCacheInfo:
    cached_tokens: int = 0
    total_prompt_tokens: int = 0


class Status(Enum):
    PENDING = "pending"
    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ABORTED = "aborted"
    FAILED = "failed"


@dataclass
class Sample:
    group_index: int | None = None
    index: int | None = None
    rollout_id: int | None = None
    prompt: str | list[dict[str, str]] = ""
    tokens: list[int] = field(default_factory=list)
    multimodal_inputs: dict[str, Any] | None = None
    multimodal_train_inputs: dict[str, Any] | None = None
    response: str = ""
    response_length: int = 0
    label: str | None = None
    reward: float | dict[str, Any] | None = None
    loss_mask: list[int] | None = None
    weight_versions: list[str] = field(default_factory=list)
    rollout_log_probs: list[float] | None = None
    rollout_top_p_token_ids: Any = None
    rollout_top_p_token_offsets: Any = None
    rollout_routed_experts: Any = None
    remove_sample: bool = False
    teacher_log_probs: list[float] | None = None
    status: Status = Status.PENDING
    metadata: dict[str, Any] = field(default_factory=dict)
    generate_function_path: str | None = None
    train_metadata: dict[str, Any] | None = None
    session_id: str | None = None
    non_generation_time: float = 0.0
    spec_info: SpecInfo = field(default_factory=SpecInfo)
    prefix_cache_info: PrefixCacheInfo = field(default_factory=PrefixCacheInfo)


def make_args(**changes: Any) -> SimpleNamespace:
    """The arguments of a job that the hooks read."""
    given: dict[str, Any] = {
        "rollout_temperature": 0.7,
        "rollout_top_p": 1.0,
        "rollout_top_k": -1,
        "n_samples_per_prompt": 4,
        "reward_key": None,
        "partial_rollout": False,
        "hf_checkpoint": "/models/toy",
        "actor_num_nodes": 1,
        "actor_num_gpus_per_node": 1,
        "bf16": True,
        "fp16": False,
        "qkv_format": "thd",
        "global_batch_size": 16,
        "keep_old_actor": False,
        "update_weights_interval": 1,
        "custom_generate_function_path": None,
        "rollout_sample_hook_path": [],
        "dynamic_sampling_filter_path": None,
        "rollout_all_samples_process_path": None,
        "custom_rollout_log_function_path": None,
        "rollout_data_postprocess_path": None,
        "custom_tis_function_path": None,
        "custom_megatron_before_log_prob_hook_path": None,
        "custom_megatron_before_train_step_hook_path": None,
    }
    return SimpleNamespace(**{**given, **changes})


def load_function(path: str) -> Any:
    """How slime finds a function by its path."""
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def log_table(version: int, temperature: float) -> np.ndarray:
    """float64[VOCAB, VOCAB]: log-probabilities of the next token given the last, under a weight version."""
    logits = np.random.default_rng(1000 + version).standard_normal((VOCAB, VOCAB)) / temperature
    return logits - np.logaddexp.reduce(logits, axis=1, keepdims=True)


class Engine:
    """Samples from the table; `scores` is the temperature its returned log-probabilities are taken at."""

    def __init__(self, version: int = 1, temperature: float = 0.7, scores: float | None = None, seed: int = 0) -> None:
        self.version, self.temperature, self.scores = version, temperature, scores or temperature
        self.rng = np.random.default_rng(seed)

    def sample(self, tokens: list[int], count: int) -> tuple[list[int], list[float]]:
        drawn, said = log_table(self.version, self.temperature), log_table(self.version, self.scores)
        out, values, last = [], [], tokens[-1]
        for _ in range(count):
            p = np.exp(drawn[last])
            token = int(self.rng.choice(VOCAB, p=p / p.sum()))
            values.append(float(min(said[last, token] + NOISE * self.rng.standard_normal(), -1e-6)))
            out.append(token)
            last = token
        return out, values


ENGINE = SimpleNamespace(now=Engine())


def append(sample: Sample, tokens: list[int], values: list[float] | None, trainable: bool = True) -> None:
    """Sample.append_response_tokens: tool tokens get mask 0 and log-probability 0.0."""
    before = sample.response_length
    sample.tokens = sample.tokens + tokens
    sample.response_length += len(tokens)
    sample.loss_mask = (sample.loss_mask or [1] * before) + [int(trainable)] * len(tokens)
    sample.rollout_log_probs = (sample.rollout_log_probs or []) + (values or [0.0] * len(tokens))
    if trainable:
        sample.weight_versions = [*sample.weight_versions, str(ENGINE.now.version)]


async def generate(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """The framework's default: one engine call, or the rest of an aborted one."""
    sampling_params["max_new_tokens"] -= sample.response_length
    count = sampling_params["max_new_tokens"]
    abort = sample.metadata.pop("abort_after", None)
    append(sample, *ENGINE.now.sample(sample.tokens, abort or count))
    sample.prefix_cache_info.cached_tokens += 1
    sample.prefix_cache_info.total_prompt_tokens += len(sample.tokens)
    sample.status = Status.ABORTED if abort else Status.COMPLETED
    return sample


async def with_a_tool(args: Any, sample: Sample, sampling_params: dict[str, Any], evaluation: bool = False) -> Sample:
    """A job's own multi-turn generation: call, tool answer (masked), call."""
    append(sample, *ENGINE.now.sample(sample.tokens, 10))
    append(sample, [7, 8, 9, 7, 8], None, trainable=False)
    append(sample, *ENGINE.now.sample(sample.tokens, 10))
    sample.status = Status.COMPLETED
    return sample


async def two_segments(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> list[Sample]:
    """A job's own generation that returns two training samples for one prompt."""
    first, second = copy.deepcopy(sample), copy.deepcopy(sample)
    for one in (first, second):
        append(one, *ENGINE.now.sample(one.tokens, 12))
        one.status, one.rollout_id = Status.COMPLETED, sample.index
    return [first, second]


def vanilla_tis_function(args: Any, *, pg_loss: Any, train_log_probs: Any, rollout_log_probs: Any, **_: Any) -> Any:
    """The framework's default importance weighting."""
    ratio = torch.exp(torch.cat(train_log_probs) - torch.cat(rollout_log_probs))
    return pg_loss * ratio.clamp(0, 2), _["loss_masks"], {"tis": ratio}


def prompts(start: int, groups: int, each: int) -> list[list[Sample]]:
    """Groups of fresh samples of one prompt each."""
    out = []
    for g in range(groups):
        tokens = [1, 2, 3 + (start // each + g) % 50]
        out.append(
            [Sample(start // each + g, start + g * each + i, prompt="p", tokens=list(tokens)) for i in range(each)]
        )
    return out


async def one_sample(args: Any, sample: Sample, rollout_id: int, evaluation: bool = False) -> Any:
    """generate_and_rm: the generate function, the sample hooks, the reward."""
    params = {"temperature": args.rollout_temperature, "top_p": args.rollout_top_p, "top_k": -1, "max_new_tokens": 24}
    function = load_function(args.custom_generate_function_path) if args.custom_generate_function_path else generate
    extra = {"evaluation": evaluation} if "evaluation" in inspect.signature(function).parameters else {}
    result = await function(args, sample, params, **extra)
    for path in args.rollout_sample_hook_path:
        for leaf in result if isinstance(result, list) else [result]:
            load_function(path)(args, leaf, rollout_id=rollout_id, evaluation=evaluation)
    for leaf in result if isinstance(result, list) else [result]:
        if leaf.status is not Status.ABORTED:
            leaf.reward = float(sum(leaf.tokens) % 5)
    return result


def rollout(args: Any, rollout_id: int, groups: list[list[Sample]], keep: int | None = None) -> dict[str, list[Any]]:
    """One rollout of the manager: generate, filter, take `keep` groups, log, convert to training data."""

    async def run() -> list[list[Any]]:
        return [[await one_sample(args, s, rollout_id) for s in group] for group in groups]

    done = asyncio.run(run())
    kept = []
    for group in done:
        path = args.dynamic_sampling_filter_path
        verdict = load_function(path)(args, group) if path else True
        if getattr(verdict, "keep", verdict):
            kept.append(group)
    batch = kept[:keep]
    if args.rollout_all_samples_process_path:
        load_function(args.rollout_all_samples_process_path)(args, done, None)
    samples = [s for group in batch for item in group for s in (item if isinstance(item, list) else [item])]
    if args.custom_rollout_log_function_path:
        assert load_function(args.custom_rollout_log_function_path)(rollout_id, args, samples, {}, 0.1) is False
    return convert(samples)


def convert(samples: list[Sample]) -> dict[str, list[Any]]:
    """_convert_samples_to_train_data and _split_train_data_by_dp for one data-parallel rank."""
    for sample in samples:
        sample.loss_mask = sample.loss_mask or [1] * sample.response_length
        if sample.remove_sample:
            sample.loss_mask = [0] * sample.response_length
    return {
        "tokens": [torch.tensor(s.tokens) for s in samples],
        "response_lengths": [s.response_length for s in samples],
        "total_lengths": [len(s.tokens) for s in samples],
        "sample_indices": [s.index for s in samples],
        "loss_masks": [torch.tensor(s.loss_mask, dtype=torch.int) for s in samples],
        "rollout_log_probs": [torch.tensor(s.rollout_log_probs, dtype=torch.float32) for s in samples],
        "rewards": [s.reward for s in samples],
        "partition": list(range(len(samples))),
        "num_microbatches": [2],
    }


class WeightUpdater:
    def __init__(self, version: int) -> None:
        self.weight_version = version


class Trainer:
    """MegatronTrainRayActor: the log-prob pass, the hooks around it, the training step. CP cuts as a ring does."""

    def __init__(self, args: Any, version: int = 1, cp: int = 0, cp_size: int = 1, scores: float | None = None) -> None:
        self.args, self.cp, self.cp_size = args, cp, cp_size
        self.weight_updater = WeightUpdater(version)
        self.table = log_table(version, args.rollout_temperature if scores is None else scores)
        self.losses: list[Any] = []

    def cut(self, values: torch.Tensor, total: int, response: int) -> torch.Tensor:
        """The response values this context-parallel rank owns, found position by position."""
        if self.cp_size == 1:
            return values
        chunk = -(-total // (2 * self.cp_size))
        mine = (self.cp, 2 * self.cp_size - 1 - self.cp)
        logits = range(total - response - 1, total - 1)
        return torch.cat([values[[i for i, p in enumerate(logits) if p // chunk == c]] for c in mine])

    def log_probs(self, data: dict[str, Any]) -> list[torch.Tensor]:
        out = []
        for tokens, response in zip(data["tokens"], data["response_lengths"]):
            ids = tokens.numpy()
            values = torch.tensor(self.table[ids[:-1], ids[1:]][-response:], dtype=torch.float32)
            out.append(self.cut(values, len(ids), response))
        return out

    def train_actor(self, rollout_id: int, data: dict[str, Any], reuse: bool = False, steps: int = 1) -> None:
        data = dict(data)
        data["rollout_log_probs"] = [
            self.cut(v, t, r)
            for v, t, r in zip(data["rollout_log_probs"], data["total_lengths"], data["response_lengths"])
        ]
        if path := self.args.custom_megatron_before_log_prob_hook_path:
            load_function(path)(self.args, [torch.nn.Linear(2, 2, dtype=torch.bfloat16)], "")
        if not reuse:
            data["log_probs"] = self.log_probs(data)
        if path := self.args.rollout_data_postprocess_path:
            load_function(path)(self.args, rollout_id, data)
        if self.args.custom_tis_function_path:
            self.update(rollout_id, data, steps)

    def update(self, rollout_id: int, data: dict[str, Any], steps: int) -> None:
        """The training steps: every micro-batch is a list of the batch's own objects."""
        tis = load_function(self.args.custom_tis_function_path)
        current = data.get("log_probs") or self.log_probs(data)
        count = len(current)
        for step in range(steps):
            if path := self.args.custom_megatron_before_train_step_hook_path:
                load_function(path)(self.args, rollout_id, step, None, None, None)
            for micro in np.array_split(np.arange(count)[step::steps], 2):
                picked = {k: [data[k][i] for i in micro] for k in ("rollout_log_probs", "loss_masks", "total_lengths")}
                trained = [current[i] for i in micro]
                loss = torch.ones(sum(len(v) for v in trained))
                self.losses.append(
                    tis(
                        args=self.args,
                        pg_loss=loss,
                        train_log_probs=trained,
                        response_lengths=[data["response_lengths"][i] for i in micro],
                        **picked,
                    )[0]
                )
