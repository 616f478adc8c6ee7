"""The rollout process: vLLM loads each published version, generates a step of samples, hands them over.

    python rollout.py JOB.json

The recorder is `rlk_ledger.integrations.vllm.attach`; nothing here records a sample.
"""

import os
import sys
from typing import Any

os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", TORCH_COMPILE_DISABLE="1", VLLM_CPU_KVCACHE_SPACE="1")

import torch
from variants import (
    GROUP_SIZE,
    GROUPS,
    STEPS,
    TEMPERATURE,
    VARIANTS,
    WAIT_S,
    Job,
    Variant,
    read_job,
    version_name,
)
from vllm import LLM, SamplingParams

import rlk_ledger
from rlk_ledger.integrations import vllm as ledger_vllm
from rlk_ledger_replay.demo.exchange import Rolled, RolledStep, put, step_file, wait_for
from rlk_ledger_replay.demo.tasks import Task, reward, tasks_of


def start(job: Job, variant: Variant) -> tuple[Any, dict[str, Any]]:
    """(a vLLM engine in this process with the first weights, the arguments it was given)."""
    asked = {
        "dtype": "bfloat16",
        "enforce_eager": True,
        "max_model_len": 512,
        "logprobs_mode": variant.logprobs_mode,
        "enable_prefix_caching": True,
        "seed": 0,
    }
    return LLM(str(job.model(variant)), skip_tokenizer_init=True, **asked), asked


def run(job: Job, variant: Variant, llm: Any, asked: dict[str, Any]) -> None:
    """One variant from its first version to its last step, recorded as one run."""
    rlk_ledger.init(
        job.ledger,
        run_id=variant.name,
        role="rollout",
        rank=0,
        world_size=1,
        roles={"rollout": 1, "training": 2},
        spool=job.spool,
        engine={"name": "vllm", "instance": "rollout-0"},
    )
    llm.llm_engine.set_weight_version(f"before-{variant.name}")  # what an earlier run left in this engine
    watch = ledger_vllm.attach(llm, engine="rollout-0", requested=asked, group_id=lambda output, _: output.request_id)
    for step in range(STEPS):
        with rlk_ledger.scope(step=step, rollout_id=step):
            load(job, variant, llm, watch, step)
            generate(job, variant, llm, watch, step)
    watch.detach()
    rlk_ledger.flush("committed", timeout=WAIT_S)
    rlk_ledger.close(timeout=WAIT_S)


def load(job: Job, variant: Variant, llm: Any, watch: Any, step: int) -> None:
    """Reloads vLLM with the published weights of `step` and names the version; a stale engine loads the first again."""
    wait_for(job.weights(variant, step), WAIT_S)
    folder = job.weights(variant, 0 if variant.stale else step)
    llm.collective_rpc("reload_weights", kwargs={"weights_path": str(folder)})
    llm.reset_prefix_cache()
    llm.llm_engine.set_weight_version(version_name(step))


def generate(job: Job, variant: Variant, llm: Any, watch: Any, step: int) -> None:
    """Samples every task of the step and hands the samples to the trainer."""
    tasks = tasks_of(step, GROUPS)
    parameters = [
        SamplingParams(
            n=GROUP_SIZE,
            temperature=TEMPERATURE,
            max_tokens=task.sampled,
            logprobs=0,
            detokenize=False,
            stop_token_ids=[257],
            seed=1009 * step + index,
        )
        for index, task in enumerate(tasks)
    ]
    outputs = llm.generate([{"prompt_token_ids": task.prompt} for task in tasks], parameters, use_tqdm=False)
    rolled = [one for task, output in zip(tasks, outputs) for one in samples_of(task, output, watch)]
    put(step_file(job.work(variant), step), RolledStep(step, step, rolled))


def samples_of(task: Task, output: Any, watch: Any) -> list[Rolled]:
    """What the trainer gets of one request."""
    out = []
    for completion in output.outputs:
        tokens = list(completion.token_ids)
        mask = [1] * len(tokens)
        values: list[float | None] = [next(iter(at.values())).logprob for at in completion.logprobs]
        out.append(
            Rolled(
                sample_id=watch.sample_id(output, completion),
                group_id=output.request_id,
                prompt=task.prompt,
                response=tokens,
                loss_mask=mask,
                logprobs=values,
                reward=reward(tokens, mask),
            )
        )
    return out


def main(path: str) -> None:
    """Runs every variant; a vLLM engine serves those that ask for the same one."""
    if hasattr(torch.cpu, "_init_amx"):
        torch.cpu._init_amx()
    job, llm, serves, asked = read_job(path), None, None, {}
    for variant in VARIANTS:
        wanted = (variant.logprobs_mode, variant.tied)
        if serves != wanted:
            del llm
            llm, asked = start(job, variant)
            serves = wanted
        run(job, variant, llm, asked)
        print(variant.name, "rolled", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
