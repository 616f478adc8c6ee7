"""The Megatron-core scorer: full forward over right-padded micro-batches, on one or several tensor-parallel ranks.

Run as `python -m rlk_ledger_replay.scorers.megatron JOB ANSWER`: this process is rank 0 and starts the others with the
same job; they answer nobody. Legend: S positions, B rows, H hidden, V vocabulary of this rank.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rlk_ledger_replay.checkpoint import load_checkpoint
from rlk_ledger_replay.scorers import megatron_model
from rlk_ledger_replay.scorers.held import head_product, held_guard
from rlk_ledger_replay.scorers.protocol import (
    Guard,
    Job,
    Pass,
    Statement,
    TokenSequence,
    Unsupported,
    plain_knobs,
    read_job,
)
from rlk_ledger_replay.scorers.serve import die_with_parent, main, told

COLLECTIVE_S = 300
"""How long a rank waits for another before it gives up."""
FUSIONS = (
    "gradient_accumulation_fusion",
    "masked_softmax_fusion",
    "bias_dropout_fusion",
    "bias_activation_fusion",
    "apply_rope_fusion",
)


class MegatronEngine:
    """One tensor-parallel rank of a GPT model over one checkpoint, in eval mode."""

    def __init__(self, job: Job, store: str, rank: int = 0) -> None:
        """Joins the ranks at `store` (a file none of them has made yet) and loads this rank's part."""
        import megatron.core
        from megatron.core import parallel_state

        self.job, self.rank, self.ranks = job, rank, job.tensor_parallel
        self.version = str(megatron.core.__version__)
        torch.set_num_threads(job.threads)
        gpus = torch.cuda.is_available()
        self.device = torch.device("cuda", rank) if gpus else torch.device("cpu")
        if gpus:
            torch.cuda.set_device(self.device)
        else:
            megatron_model.on_cpu()
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        torch.distributed.init_process_group(
            "nccl" if gpus else "gloo",
            init_method=f"file://{store}",
            rank=rank,
            world_size=self.ranks,
            timeout=timedelta(seconds=COLLECTIVE_S),
        )
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=self.ranks)
        checkpoint = load_checkpoint(job.folder)
        self.config = checkpoint.config
        self.model: Any = megatron_model.build(self.config, getattr(torch, job.dtype), self.ranks, self.device)
        megatron_model.load(self.model, checkpoint, rank, self.ranks)
        self.head_dtype = getattr(torch, job.head or job.dtype)
        self.logits_dtype = getattr(torch, job.logits or job.head or job.dtype)
        self.model.post_process = False  # forward ends at the last hidden state; the head follows in `_logits`
        tensors = megatron_model.held(self.model, self.config, self._gather)
        self.weights = held_guard(tensors, job, f"gathered from the parameters of {self.ranks} ranks")

    def statement(self) -> Statement:
        """What runs, read from the live model."""
        from megatron.core import parallel_state

        config = self.model.config
        dtype = "+".join(sorted({str(p.dtype).removeprefix("torch.") for p in self.model.parameters()}))
        ranks = parallel_state.get_tensor_model_parallel_world_size()
        fused = [name for name in FUSIONS if getattr(config, name)]
        knobs: dict[str, tuple[Any, Any]] = {
            "dtype": (self.job.dtype, dtype),
            "head_dtype": (self.job.head, str(self.head_dtype).removeprefix("torch.")),
            "logits_dtype": (self.job.logits, str(self.logits_dtype).removeprefix("torch.")),
            "tensor_parallel": (self.ranks, ranks),
            "sequence_parallel": (False, config.sequence_parallel),
            "backend": (None, torch.distributed.get_backend()),
            "norm": (None, type(self.model.decoder.final_layernorm).__name__),
            "attention": (None, type(self.model.decoder.layers[0].self_attention.core_attention).__name__),
            **{name: (False, getattr(config, name)) for name in FUSIONS},
        }
        return Statement(
            engine="megatron",
            version=self.version,
            device=str(self.device),
            dtype=dtype,
            how={"prefill": self._how()},
            knobs=plain_knobs(knobs),
            guards=(
                self.weights,
                _guard("dtype", dtype == self.job.dtype, f"the parameters are {dtype}, not {self.job.dtype}"),
                _guard("tensor_parallel", ranks == self.ranks, f"{ranks} ranks run, {self.ranks} were asked for"),
                _guard("fusions.off", not fused, f"{', '.join(fused)} is on"),
                _guard("eval_mode", not self.model.training, "the model is in training mode"),
                self._order(ranks),
            ),
        )

    @torch.inference_mode()
    def score(self, task: Pass) -> tuple[list[NDArray[np.float32]], list[Guard]]:
        """Scores a layout micro-batch by micro-batch; every rank must be asked for the same passes in order."""
        if task.path != "prefill":
            raise Unsupported("Megatron-core trains: this scorer has no decode path")
        if task.layout.padding == "left":
            raise Unsupported("left padding is not a layout of Megatron-core")
        values = [np.full(one.scored, np.nan, dtype=np.float32) for one in self.job.sequences]
        for batch in task.layout.batches:
            rows = self._batch([self.job.sequences[index] for index in batch])
            for index, row in zip(batch, rows):
                values[index] = row
        flat = torch.from_numpy(np.concatenate(values)).to(self.device)
        alike = all(torch.equal(flat.nan_to_num(), other.nan_to_num()) for other in self._gather(flat))
        return values, [_guard("replicas.equal", alike, "the ranks computed different values")]

    def _batch(self, batch: Sequence[TokenSequence]) -> list[NDArray[np.float32]]:
        width = max(len(one.tokens) for one in batch)
        ids_BS = torch.tensor([one.tokens + [0] * (width - len(one.tokens)) for one in batch], device=self.device)
        positions_BS = torch.arange(width, device=self.device).expand_as(ids_BS)
        later = torch.ones(width, width, dtype=torch.bool, device=self.device).triu(1)[None, None]
        hidden_SBH = self.model(ids_BS, positions_BS, later)
        logits_SBV = self._logits(hidden_SBH)
        if self.job.mode == "processed":
            temperatures = torch.tensor([one.temperature for one in batch], device=self.device)
            logits_SBV = logits_SBV / temperatures[None, :, None]
        following_SB = torch.roll(ids_BS, -1, dims=1).T.contiguous()
        values_SB = self._logprobs(logits_SBV, following_SB)
        return [
            values_SB[one.start - 1 : one.start - 1 + one.scored, row].cpu().numpy() for row, one in enumerate(batch)
        ]

    def _logits(self, hidden_SBH: torch.Tensor) -> torch.Tensor:
        """This rank's part of the logits, float32; vocabulary padding is minus infinity."""
        tied = self.model.share_embeddings_and_output_weights
        weight = self.model.shared_embedding_or_output_weight() if tied else self.model.output_layer.weight
        logits_SBV: torch.Tensor
        if self.head_dtype == self.logits_dtype == hidden_SBH.dtype:
            logits_SBV = self.model.output_layer(hidden_SBH, weight=weight)[0].float()
        else:
            logits_SBV = head_product(hidden_SBH, weight, self.head_dtype, self.logits_dtype).float()
        columns = logits_SBV.shape[-1]
        real = self.config.vocabulary - self.rank * columns
        if real < columns:
            logits_SBV[..., max(real, 0) :] = float("-inf")
        return logits_SBV

    def _logprobs(self, logits_SBV: torch.Tensor, following_SB: torch.Tensor) -> torch.Tensor:
        """Megatron-core's own vocabulary-parallel cross entropy, negated."""
        from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

        loss: torch.Tensor = vocab_parallel_cross_entropy(logits_SBV.contiguous(), following_SB)
        return -loss

    def _how(self) -> str:
        head = "the engine's output layer"
        if {self.head_dtype, self.logits_dtype} != {getattr(torch, self.job.dtype)}:
            head = "the engine's last hidden state times its head, in the dtypes declared for head and logits"
        return f"full forward; {head}; vocabulary-parallel cross entropy over float32 logits"

    def _order(self, ranks: int) -> Guard:
        if ranks <= 2:
            return Guard("collectives.order", "passed", f"a sum of {ranks} rank{'s' * (ranks > 1)} has one order")
        return Guard("collectives.order", "unknown", f"the order in which {ranks} ranks are summed is not pinned")

    def _gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        if self.ranks == 1:
            return [tensor]
        parts = [torch.empty_like(tensor) for _ in range(self.ranks)]
        torch.distributed.all_gather(parts, tensor.contiguous())
        return parts


def follow(job_file: str, store: str, rank: int) -> None:
    """A rank other than 0: the same passes in the same order, for their collectives alone."""
    die_with_parent()
    job = read_job(Path(job_file))
    engine = MegatronEngine(job, store, rank)
    for task in job.passes:
        try:
            engine.score(task)
        except Unsupported as error:
            sys.stderr.write(f"rank {rank}: {told(error)}\n")


def _open(job: Job) -> MegatronEngine:
    """Rank 0, after it started the others; they end with this process.

    Raises what a missing engine or a model it cannot hold raises, before any rank is started.
    """
    import megatron.core  # noqa: F401

    megatron_model.check(load_checkpoint(job.folder).config, job.tensor_parallel)
    job_file = sys.argv[1]
    store = f"{job_file}.ranks"
    for rank in range(1, job.tensor_parallel):
        subprocess.Popen([sys.executable, "-m", "rlk_ledger_replay.scorers.megatron", job_file, store, str(rank)])
    return MegatronEngine(job, store)


def _guard(name: str, fine: bool, wrong: str) -> Guard:
    return Guard(name, "passed" if fine else "failed", "as it should be" if fine else wrong)


if __name__ == "__main__":
    if len(sys.argv) == 4:
        follow(sys.argv[1], sys.argv[2], int(sys.argv[3]))
    else:
        raise SystemExit(main(_open, "megatron"))
