"""P3: a training loop with the recorder on and off, and with a bucket that cannot be reached.

    python tools/bench/p3_training_loop.py [--pairs N] [--json FILE]

A small GPT on one core takes policy-gradient steps; with the recorder on, every step records each sample, both sides'
log-probabilities and the batch's layout. Steps with and without recording are interleaved in one process. The dead
bucket is a directory below a regular file: every write fails, so the shipper retries and the spool grows.
"""

import argparse
import json
import os
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from interleaved import Clock, Side, interleave, shipper_cpu, told

import rlk_ledger

VOCABULARY, WIDTH, LAYERS, PROMPT = 1024, 256, 4, 32


class Gpt(torch.nn.Module):
    """A causal transformer of about 4 M parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(VOCABULARY, WIDTH)
        self.place = torch.nn.Embedding(1024, WIDTH)
        layer = torch.nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, 0.0, batch_first=True, norm_first=True)
        self.layers = torch.nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.head = torch.nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Logits [B, S, V] of ids [B, S]."""
        hidden = self.embed(ids) + self.place(torch.arange(ids.shape[1]))
        mask = torch.nn.Transformer.generate_square_subsequent_mask(ids.shape[1])
        return self.head(self.layers(hidden, mask=mask, is_causal=True))


class Loop:
    """A step over `samples` responses of `tokens` tokens; `record` records what it did."""

    def __init__(self, samples: int, tokens: int) -> None:
        torch.manual_seed(0)
        self.samples, self.tokens = samples, samples * tokens
        self._model = Gpt()
        self._optimiser = torch.optim.AdamW(self._model.parameters(), lr=1e-4)
        self._ids = torch.randint(0, VOCABULARY, (samples, PROMPT + tokens))
        self._response = self._ids[:, PROMPT:].to(torch.int32)
        self._mask = torch.ones(samples, tokens, dtype=torch.uint8)
        self._rollout = -torch.rand(samples, tokens)
        self._count = 0
        self.contract = ""
        self.clock = Clock()
        self._record = self.clock.inside(self._recorded)

    def off(self) -> torch.Tensor:
        """A step; returns the log-probabilities [B, tokens] it learned from."""
        logits = self._model(self._ids)[:, PROMPT - 1 : -1]
        values = torch.log_softmax(logits, -1).gather(2, self._ids[:, PROMPT:, None])[..., 0]
        loss = -(values * (values.detach() - self._rollout).exp().clamp(0.8, 1.2)).mean()
        self._optimiser.zero_grad()
        loss.backward()
        self._optimiser.step()
        return values.detach()

    def on(self) -> None:
        """The same step, recorded."""
        self._record(self.off())

    def _recorded(self, values: torch.Tensor) -> None:
        step = self._count
        self._count += 1
        with rlk_ledger.scope(step=step):
            names = [f"{step}-{i}" for i in range(self.samples)]
            lengths = [self._ids.shape[1]] * self.samples
            rlk_ledger.record("batch.layout", layout_id=f"l{step}", sample_order=names, sequence_lengths=lengths)
            for i, name in enumerate(names):
                span = {"version": f"v{step}", "start": 0, "end": self._response.shape[1]}
                rlk_ledger.record(
                    "rollout.sample",
                    sample_id=name,
                    response_token_ids=self._response[i],
                    loss_mask=self._mask[i],
                    weight_spans=[span],
                )
                for source, held in (("rollout", self._rollout), ("training", values)):
                    rlk_ledger.record(
                        "logprobs",
                        sample_id=name,
                        source=source,
                        values=held[i],
                        contract_id=self.contract,
                        weight_version=f"v{step}",
                    )


def measure(url: str, spool: Path, title: str, pairs: int, alive: bool) -> dict[str, Any]:
    """The loop against one bucket."""
    loop = Loop(16, 128)
    rlk_ledger.init(url, run_id="bench", role="training", roles={"training": 1}, spool=spool)
    body = {"mode": "processed", "temperature": 1.0, "compute_dtype": "float32"}
    loop.contract = str(rlk_ledger.record("contract.declared", kind="logprob", version="1", body=body).contract_id)
    if alive:
        rlk_ledger.flush("committed", timeout=60)
    found = interleave(Side(lambda: None, loop.off), Side(lambda: None, loop.on), loop.clock, pairs)
    notes = {"shipper": f"{shipper_cpu(spool):.2f} CPU s in all, its start included, in a process of its own"}
    if not alive:
        held = sum(path.stat().st_blocks * 512 for path in spool.rglob("*.spool"))
        notes["bucket dead"] = f"nothing committed, {held / 1e6:.0f} MB held in the spool"
    document = told(title, found, loop.samples, loop.tokens, notes)
    rlk_ledger.close(timeout=60 if alive else 0)
    return document


def main() -> None:
    """Prints both tables and writes the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir="/var/tmp") as where:
        (Path(where) / "file").write_text("no directory")
        buckets = {"loop": (f"{where}/ledger", True), "loop, bucket dead": (f"{where}/file/ledger", False)}
        found = [
            measure(url, Path(where) / f"spool-{alive}", f"P3  training {name}", options.pairs, alive)
            for name, (url, alive) in buckets.items()
        ]
    if options.json:
        options.json.write_text(json.dumps([{"row": "P3", **one} for one in found], indent=1) + "\n")


if __name__ == "__main__":
    main()
