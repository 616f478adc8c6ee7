"""A job that generates without end and prints, for each batch, the samples it has recorded: run by test_vllm_processes.

argv: kind (sync, async), model folder, tensor ranks. One JSON document per line on stdout.
"""

import asyncio
import json
import sys
import time
from typing import Any

PROMPTS = [[256, 70, 80, 90], [256, *[65 + (7 * i) % 50 for i in range(100)]]]
OPTIONS: dict[str, Any] = {
    "enforce_eager": True,
    "skip_tokenizer_init": True,
    "dtype": "bfloat16",
    "max_model_len": 512,
    "max_num_batched_tokens": 64,
    "logprobs_mode": "processed_logprobs",
}


def say(**what: Any) -> None:
    print(json.dumps(what), flush=True)


def sampling(**changes: Any) -> Any:
    from vllm import SamplingParams

    plain = {"logprobs": 0, "detokenize": False, "max_tokens": 6, "temperature": 0.8, "ignore_eos": True, "n": 2}
    return SamplingParams(**{**plain, **changes})


def synchronous(model: str, ranks: int) -> None:
    from vllm import LLM

    from rlk_ledger.integrations.vllm import attach

    llm = LLM(model, tensor_parallel_size=ranks, **OPTIONS)
    watch = attach(llm, weight_version="step-0")
    prompts: Any = [{"prompt_token_ids": p} for p in PROMPTS]
    while True:
        outputs = llm.generate(prompts, sampling(), use_tqdm=False)
        say(recorded=[watch.sample_id(o, c) for o in outputs for c in o.outputs])


async def asynchronous(model: str) -> None:
    """No line of it knows of the recorder: RLK_VLLM asks for it."""
    from vllm import AsyncEngineArgs
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine.async_llm import AsyncLLM

    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(model=model, **OPTIONS))
    await engine.update_weight_version("step-0")
    kinds = (RequestOutputKind.DELTA, RequestOutputKind.CUMULATIVE, RequestOutputKind.FINAL_ONLY)

    async def one(name: str, prompt: list[int], params: Any, leave_after: int | None = None) -> None:
        outputs = engine.generate({"prompt_token_ids": prompt}, params, name)
        got: dict[int, list[int]] = {}
        last: Any = None
        seen = 0
        async for last in outputs:
            for completion in last.outputs:
                tokens = list(completion.token_ids)
                delta = params.output_kind is RequestOutputKind.DELTA
                got[completion.index] = (got.get(completion.index, []) if delta else []) + tokens
            seen += 1
            if leave_after == seen:
                break
        await outputs.aclose()
        say(recorded=[f"{name}-{i}" for i in got], tokens={f"{name}-{i}": t for i, t in got.items()})

    await one("left", PROMPTS[0], sampling(n=1, max_tokens=400, output_kind=kinds[0]), leave_after=3)
    for i in range(10**9):
        params = [sampling(output_kind=kind) for kind in kinds]
        await asyncio.gather(*(one(f"r{i}-{k}", PROMPTS[1], p) for k, p in enumerate(params)))
        if i == 1:
            await engine.collective_rpc("reload_weights", kwargs={"weights_path": model})
            await engine.reset_prefix_cache()
            await engine.update_weight_version("step-1")


def main() -> None:
    import rlk_ledger
    from rlk_ledger.integrations.vllm import enable

    kind, model, ranks = sys.argv[1], sys.argv[2], int(sys.argv[3])
    try:
        if kind == "async":
            asyncio.run(asynchronous(model))
        else:
            rlk_ledger.init(role="rollout")
            enable("rollout-0")
            synchronous(model, ranks)
    except Exception as error:
        say(died=type(error).__name__)
    rlk_ledger.record("rollout.sample", sample_id="after", response_token_ids=[1], loss_mask=[1])
    say(recorded=["after"])
    time.sleep(600)


if __name__ == "__main__":
    main()
