"""What an engine says about itself: contracts and settings read back from the live network, and its own head."""

from typing import Any

import torch

import rlk_ledger
from rlk_ledger_replay.demo.faults import Side
from rlk_ledger_replay.demo.settings import Settings
from rlk_ledger_sdk.integrations.transformers import Attached, attach

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


def attach_network(settings: Settings, side: Side, network: Any) -> Attached:
    """Records what the live network is: its norm, attention and rope contracts, its settings beside those asked for."""
    asked = {
        "torch.num_threads": settings.threads,
        "torch.deterministic_algorithms": True,
        "model.dtype": "bfloat16",
        "model.attention": "sdpa",
        "model.training_mode": False,
    }
    return attach(network, engine=INSTANCE[side], requested=asked)


def declare_logprobs(settings: Settings, side: Side, attached: Attached) -> str:
    """Declares the logprob contract of one side as it is really computed; returns its id.

    The engines apply the head themselves (`network.log_softmax`), in the dtype of their numerics.
    """
    numerics = settings.numerics(side)
    return attached.contract(
        mode="processed",
        temperature=numerics.temperature,
        top_p=1.0,
        top_k=-1,
        head_dtype=numerics.head_dtype,
        logits_dtype=numerics.head_dtype,
        reduction_dtype=numerics.head_dtype,
        execution_path=EXECUTION_PATH[side],
    )
