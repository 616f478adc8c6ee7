"""The Hugging Face transformers scorer: padded batches by full forward, or by KV cache one token at a time.

Run as `python -m rlk_ledger_replay.scorers.transformers JOB ANSWER`.

Legend: B rows, T positions, H hidden, V vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rlk_ledger_replay.scorers.held import head_product, held_guard
from rlk_ledger_replay.scorers.protocol import Guard, Job, Layout, Pass, Statement, TokenSequence, plain_knobs
from rlk_ledger_replay.scorers.serve import main

HEAD = "the last hidden state times the head, log-softmax in float32"


class TransformersEngine:
    """One causal language model of transformers over one checkpoint, in eval mode."""

    def __init__(self, job: Job) -> None:
        """Loads the model; raises what transformers raises."""
        import transformers

        transformers.utils.logging.disable_progress_bar()
        self.job, self.version = job, str(transformers.__version__)
        torch.set_num_threads(job.threads)
        torch.use_deterministic_algorithms(True)
        self.attention = job.settings.get("attn_implementation", "sdpa")
        device = "cuda" if torch.cuda.is_available() else "cpu"
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(
            job.folder, dtype=getattr(torch, job.dtype), attn_implementation=self.attention
        )
        self.model: Any = model.to(device).eval()
        self.device = torch.device(device)
        self.head_dtype = getattr(torch, job.head or job.dtype)
        self.logits_dtype = getattr(torch, job.logits or job.head or job.dtype)
        self.weights = held_guard(_held(self.model), job, "read back from the parameters")

    def statement(self) -> Statement:
        """What runs, read from the live model."""
        dtype = "+".join(sorted({str(p.dtype).removeprefix("torch.") for p in self.model.parameters()}))
        attention = self.model.config._attn_implementation
        dropout = [m.p for m in self.model.modules() if isinstance(m, torch.nn.Dropout) and m.p > 0]
        knobs = {
            "dtype": (self.job.dtype, dtype),
            "attn_implementation": (self.attention, attention),
            "training": (False, self.model.training),
            "head_dtype": (self.job.head, str(self.head_dtype).removeprefix("torch.")),
            "logits_dtype": (self.job.logits, str(self.logits_dtype).removeprefix("torch.")),
            "threads": (self.job.threads, torch.get_num_threads()),
            "deterministic_algorithms": (True, torch.are_deterministic_algorithms_enabled()),
        }
        return Statement(
            engine="transformers",
            version=self.version,
            device=str(self.device),
            dtype=dtype,
            how={"prefill": f"full forward; {HEAD}", "decode": f"KV cache, recorded tokens fed; {HEAD}"},
            knobs=plain_knobs(knobs),
            guards=(
                self.weights,
                _guard("dtype", dtype == self.job.dtype, f"the parameters are {dtype}, not {self.job.dtype}"),
                _guard("attention.backend", attention == self.attention, f"{attention} runs, not {self.attention}"),
                _guard("eval_mode", not self.model.training and not dropout, "dropout is active"),
            ),
        )

    @torch.inference_mode()
    def score(self, task: Pass) -> tuple[list[NDArray[np.float32]], list[Guard]]:
        """Scores a layout batch by batch along one path."""
        values = [np.full(one.scored, np.nan, dtype=np.float32) for one in self.job.sequences]
        run = self._prefill if task.path == "prefill" else self._decode
        for batch in task.layout.batches:
            rows = run([self.job.sequences[index] for index in batch], task.layout)
            for index, row in zip(batch, rows):
                values[index] = row
        return values, []

    def _prefill(self, batch: Sequence[TokenSequence], layout: Layout) -> list[NDArray[np.float32]]:
        ids_BT, mask_BT, begins = padded([one.tokens for one in batch], layout.padding == "left", self._pad())
        inputs: dict[str, Any] = {"input_ids": ids_BT.to(self.device), "attention_mask": mask_BT.to(self.device)}
        if layout.padding == "left":
            inputs["position_ids"] = (mask_BT.cumsum(1) - 1).clamp(min=0).to(self.device)
        hidden_BTH = self.model.model(**inputs, use_cache=False).last_hidden_state
        out = []
        for row, (one, begin) in enumerate(zip(batch, begins)):
            first = begin + one.start - 1
            span = slice(first, first + one.scored)
            following = torch.tensor(one.tokens[one.start :], device=self.device)
            out.append(self._values(hidden_BTH[row, span], following, one.temperature).cpu().numpy())
        return out

    def _decode(self, batch: Sequence[TokenSequence], layout: Layout) -> list[NDArray[np.float32]]:
        found: list[list[float]] = [[] for _ in batch]
        for rows, hidden_BH in _steps(self.model, batch, self._pad(), self.device):
            taken = [batch[row].tokens[batch[row].start + len(found[row])] for row in rows]
            following = torch.tensor(taken, device=self.device)
            temperatures = torch.tensor([batch[row].temperature for row in rows], device=self.device)
            for row, value in zip(rows, self._values(hidden_BH, following, temperatures[:, None]).tolist()):
                found[row].append(value)
        return [np.array(part, dtype=np.float32) for part in found]

    def _values(self, hidden_NH: torch.Tensor, following_N: torch.Tensor, temperature: Any) -> torch.Tensor:
        """Log-probabilities of `following`, float32 [N]."""
        weight = self.model.get_output_embeddings().weight
        logits_NV = head_product(hidden_NH, weight, self.head_dtype, self.logits_dtype).float()
        if self.job.mode == "processed":
            logits_NV = logits_NV / temperature
        return torch.log_softmax(logits_NV, dim=-1).gather(-1, following_N[:, None])[:, 0]

    def _pad(self) -> int:
        return int(getattr(self.model.config, "pad_token_id", None) or 0)


def _steps(
    model: Any, batch: Sequence[TokenSequence], pad: int, device: torch.device
) -> Iterator[tuple[list[int], torch.Tensor]]:
    """Per step, the rows still running and their last hidden states [B, H]; rows leave as their response ends."""
    from transformers import DynamicCache

    names = inspect.signature(model.model.forward).parameters
    keyword = "cache" if "cache" in names else "past_key_values"
    cache = DynamicCache(config=model.config)
    ids_BT, mask_BT, _ = padded([one.tokens[: one.start] for one in batch], True, pad)
    positions_BT = (mask_BT.cumsum(1) - 1).clamp(min=0)
    rows, done = list(range(len(batch))), 0
    while True:
        inputs = {"input_ids": ids_BT, "attention_mask": mask_BT, "position_ids": positions_BT}
        out = model.model(**{k: v.to(device) for k, v in inputs.items()}, use_cache=True, **{keyword: cache})
        yield rows, out.last_hidden_state[:, -1]
        done += 1
        keep = [at for at, row in enumerate(rows) if batch[row].scored > done]
        if not keep:
            return
        index = torch.tensor(keep)
        if len(keep) < len(rows):
            cache.batch_select_indices(index.to(device))
        rows = [rows[at] for at in keep]
        ids_BT = torch.tensor([[batch[row].tokens[batch[row].start + done - 1]] for row in rows])
        positions_BT = positions_BT[index, -1:] + 1
        mask_BT = torch.cat([mask_BT[index], torch.ones_like(ids_BT)], dim=1)


def padded(rows: Sequence[Sequence[int]], left: bool, pad: int) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    """Ids and mask, int64 [B, T], padded on one side, and where each row begins."""
    width = max(map(len, rows))
    gaps = [width - len(row) for row in rows]
    ids = [[pad] * gap + list(row) if left else list(row) + [pad] * gap for row, gap in zip(rows, gaps)]
    mask = [[0] * gap + [1] * len(row) if left else [1] * len(row) + [0] * gap for row, gap in zip(rows, gaps)]
    return torch.tensor(ids), torch.tensor(mask), gaps if left else [0] * len(rows)


def _held(model: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.detach() for name, tensor in model.state_dict().items()}


def _guard(name: str, fine: bool, wrong: str) -> Guard:
    return Guard(name, "passed" if fine else "failed", "as it should be" if fine else wrong)


if __name__ == "__main__":
    raise SystemExit(main(TransformersEngine, "transformers"))
