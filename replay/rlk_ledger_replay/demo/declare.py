"""What an engine says about itself: contracts taken from the numerics in force, settings read back after the fact."""

from typing import Any

import torch

import rlk_ledger
from rlk_ledger_replay.demo.faults import Side
from rlk_ledger_replay.demo.settings import Settings

EXECUTION_PATH = {"rollout": "decode", "training": "full_prefill"}
INSTANCE = {"rollout": "rollout-0", "training": "training-0"}


def open_recorder(settings: Settings, side: Side) -> None:
    """Starts recording as one of the two processes of the run."""
    rlk_ledger.init(
        settings.ledger,
        run_id=settings.run_id,
        role=side,
        rank=0,
        world_size=1,
        roles={"rollout": 1, "training": 1},
        spool=settings.spool,
        engine={"name": f"demo-{side}", "version": "1", "instance": INSTANCE[side]},
    )


def prepare_torch(settings: Settings) -> None:
    """Makes torch deterministic and takes the number of threads asked for."""
    torch.set_num_threads(settings.threads)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(settings.seed)


def logprob_body(settings: Settings, side: Side, vocabulary: int) -> dict[str, Any]:
    """The logprob contract of one side as it is really computed."""
    numerics = settings.numerics(side)
    return {
        "mode": "processed",
        "temperature": numerics.temperature,
        "top_p": 1.0,
        "top_k": -1,
        "head_dtype": numerics.head_dtype,
        "logits_dtype": numerics.head_dtype,
        "padded_vocab": vocabulary,
        "padded_vocab_policy": "include",
        "alignment": "token_i_given_before_i",
        "execution_path": EXECUTION_PATH[side],
    }


def declare_contracts(settings: Settings, side: Side, network: Any) -> str:
    """Records the side's contracts, read from the live network; returns the id of the logprob contract."""
    config = network.config
    norm = {"eps": config.rms_norm_eps, "accumulate_dtype": "float32", "rounding_order": "hf"}
    attention = {
        "mode": "causal",
        "softmax_scale": network.model.layers[0].self_attn.scaling,
        "output_dtype": str(network.dtype).removeprefix("torch."),
    }
    rlk_ledger.record("contract.declared", kind="norm", version="1", body=norm)
    rlk_ledger.record("contract.declared", kind="attention", version="1", body=attention)
    body = logprob_body(settings, side, config.vocab_size)
    return str(rlk_ledger.record("contract.declared", kind="logprob", version="1", body=body).contract_id)


def record_knobs(settings: Settings, network: Any) -> None:
    """Records what was asked for beside what is in force, read from torch and from the network."""
    dtypes = sorted({str(p.dtype).removeprefix("torch.") for p in network.parameters()})
    readings = {
        "torch.num_threads": (settings.threads, torch.get_num_threads()),
        "torch.deterministic_algorithms": (True, torch.are_deterministic_algorithms_enabled()),
        "model.dtype": ("bfloat16", "+".join(dtypes)),
        "model.attention": ("sdpa", network.config._attn_implementation),
        "model.training_mode": (False, network.training),
    }
    for path, (requested, actual) in readings.items():
        rlk_ledger.record(
            "knob.applied",
            path=path,
            requested=requested,
            actual=actual,
            status="applied" if actual == requested else "fallback",
            evidence="read back from the process after the model was loaded",
            lifecycle="process" if path.startswith("torch.") else "engine",
        )
