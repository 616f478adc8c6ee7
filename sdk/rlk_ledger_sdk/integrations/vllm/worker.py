"""What runs inside vLLM's workers, callable by name through `collective_rpc`.

Name it as `worker_extension_cls`, or let the plugin add its methods (RLK_VLLM=1); an engine that runs in this process
needs neither.
"""

import sys
from typing import Any

from rlk_ledger_sdk.integrations.vllm import adapters, held
from rlk_ledger_sdk.integrations.vllm.live import describe

QUALIFIED = "rlk_ledger_sdk.integrations.vllm.worker.LedgerExtension"
"""What to pass as `worker_extension_cls`."""


def weights_held(worker: Any, wire_dtype: str | None = None) -> dict[str, Any]:
    """The sums of every canonical tensor this worker holds, in its own dtype or in `wire_dtype` (`bfloat16`, ...).

    Returns {rank, stage, replica, sums, copies: {name: [low, high]}, shapes: {name: [dtype, *shape]},
    unread: {name: reason}, adapters: {id: digest}}.
    `copies` are sums of what another rank counts: they must agree with that rank's.
    """
    torch = sys.modules["torch"]
    tp_rank = _tp_rank(worker)
    parallel = worker.vllm_config.parallel_config
    stage = int(worker.rank) // int(parallel.tensor_parallel_size) % int(parallel.pipeline_parallel_size)
    replica = int(worker.vllm_config.parallel_config.data_parallel_rank)
    out: dict[str, Any] = {
        "rank": worker.rank,
        "stage": stage,
        "replica": replica,
        "sums": {},
        "copies": {},
        "shapes": {},
    }
    unread: dict[str, str] = {}
    dtype = None if wire_dtype is None else getattr(torch, wire_dtype)
    with torch.inference_mode():
        for piece in held.pieces(worker.model_runner.get_model(), tp_rank):
            if isinstance(piece, held.Unread):
                unread[piece.name] = piece.reason
                continue
            if dtype is not None:
                piece = piece._replace(tensor=piece.tensor.to(dtype))
            place = out["sums"] if piece.counted else out["copies"]
            place[piece.name] = list(held.sums(piece))
            out["shapes"][piece.name] = [str(piece.tensor.dtype).removeprefix("torch."), *piece.shape]
        out["adapters"] = adapters.held(worker, dtype)
    return {**out, "unread": unread}


def worker_described(worker: Any) -> dict[str, Any]:
    """What this worker runs: contracts, settings and parallel sizes, read from its live objects."""
    return describe(worker)


def _tp_rank(worker: Any) -> int:
    return int(worker.rank) % int(worker.vllm_config.parallel_config.tensor_parallel_size)


class LedgerExtension:
    """Methods a worker gains."""

    rlk_ledger_weights = weights_held
    rlk_ledger_describe = worker_described
