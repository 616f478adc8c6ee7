"""How often `explain` is right: runs of a deliberately altered decoder whose cause is known, at 4 and at 24 layers.

A run is a cause, an order of sums no prediction uses, and a random half of the groups. Predictions are scored once over
all groups and cut to each run's. Causes: every variant of the family, two at once, causes outside the family, and none.

Expected before it ran: right in at least 95 % where the predictions of cause and declaration differ by more than the
floor; no name or the right class where they do not; nothing named for clean runs; no name, or `none_of_these`, where
the cause is outside the family. Declared in bfloat16 the rounding of the head, of the cache and of a log-sum-exp should
drown at 24 layers; declared in float32 every narrow dtype should be seen at both depths.

    python tools/explain_rate.py --runs 20 --layers 4 24 --declared bfloat16 float32
"""

from __future__ import annotations

import argparse
import inspect
import json
import math
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

import rlk_ledger_replay
from rlk_ledger_kernels.dtypes import DType
from rlk_ledger_kernels.schedule import Schedule, placebo_schedules
from rlk_ledger_replay.decoder import Decoder
from rlk_ledger_replay.explain.answer import Answer, Scored, answer
from rlk_ledger_replay.explain.family import family
from rlk_ledger_replay.explain.variant import Variant
from rlk_ledger_replay.intervals import draw
from rlk_ledger_replay.numerics import Numerics

MODEL = Path(rlk_ledger_replay.__path__[0]) / "model"
ENGINES = (
    Schedule(k_leaf=96, kv_block=16, vocab_tile=272, kv_order="reverse"),
    Schedule(k_leaf=48, kv_block=64, vocab_tile=64, k_order="descending"),
    Schedule(k_leaf=112, kv_block=32, vocab_tile=100, vocab_order="reverse"),
)
SKIPPED = ("router=", "top_p", "compute=float16")
Weights = Mapping[str, torch.Tensor]
Values = np.ndarray


def texts(count: int, length: int = 56) -> list[tuple[list[int], int]]:
    """(token ids, start) cut from documentation every Python installation has."""
    prose = ((inspect.getdoc(json) or "") + (inspect.getdoc(inspect) or "") + (inspect.getdoc(argparse) or "")).encode()
    step = max(1, (len(prose) - length) // count)
    return [([256, *prose[i * step : i * step + length]], 20) for i in range(count)]


def deepened(layers: int, seed: int) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """The shipped model, or a random tiny one of `layers` layers whose log-probabilities are not confident."""
    config = json.loads((MODEL / "config.json").read_text())
    tensors = load_file(MODEL / "model.safetensors")
    if layers == config["num_hidden_layers"]:
        return config, tensors
    h, d, inner = 64, 16, 128
    config |= {"num_hidden_layers": layers, "hidden_size": h, "intermediate_size": inner, "head_dim": d}
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * scale / shape[-1] ** 0.5

    out = {"model.embed_tokens.weight": normal(272, h, scale=3.0), "model.norm.weight": torch.full((h,), 1.5)}
    for index in range(layers):
        at = f"model.layers.{index}"
        for name in ("input_layernorm", "post_attention_layernorm"):
            out[f"{at}.{name}.weight"] = 1.0 + normal(1, h)[0]
        for name, rows, columns, scale in (
            ("self_attn.q_proj", 4 * d, h, 1.0),
            ("self_attn.k_proj", 2 * d, h, 1.0),
            ("self_attn.v_proj", 2 * d, h, 1.0),
            ("self_attn.o_proj", h, 4 * d, 0.5),
            ("mlp.gate_proj", inner, h, 1.0),
            ("mlp.up_proj", inner, h, 1.0),
            ("mlp.down_proj", h, inner, 0.5),
        ):
            out[f"{at}.{name}.weight"] = normal(rows, columns, scale=scale)
        for name in ("q_norm", "k_norm"):
            out[f"{at}.self_attn.{name}.weight"] = torch.full((d,), 1.5)
    return config, {name: tensor.to(torch.bfloat16) for name, tensor in out.items()}


def moved(tensors: Weights, amount: float, seed: int) -> dict[str, torch.Tensor]:
    """The weights a small update away."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: (t.float() * (1 + amount * torch.randn(t.shape, generator=generator))).to(t.dtype)
        for name, t in tensors.items()
    }


@dataclass
class Bench:
    """One model and one declaration: scores by (variant, order of sums), each once."""

    layers: int
    declared: DType
    count: int
    kept: dict[Any, Values] = field(default_factory=dict)

    @cached_property
    def numerics(self) -> Numerics:
        """What the side declares."""
        return Numerics(compute=self.declared, lm_head="float32", logits="float32", temperature=0.8)

    @cached_property
    def models(self) -> dict[str, Decoder]:
        """Decoders by weights: recorded versions v0, v1 (the claimed one), and models outside the family."""
        config, tensors = deepened(self.layers, 7)
        fp8 = {name: t.to(torch.float8_e4m3fn).to(t.dtype) for name, t in tensors.items()}
        outside = {
            "weights nobody published": (config, moved(tensors, 0.03, 5)),
            "weights in float8": (config, fp8),
            "another rope theta": ({**config, "rope_theta": 11000.0}, tensors),
            "another eps": ({**config, "rms_norm_eps": 1e-2}, tensors),
        }
        every = {"v0": (config, moved(tensors, 0.03, 1)), "v1": (config, tensors), **outside}
        return {name: Decoder.from_tensors(one, weights) for name, (one, weights) in every.items()}

    @cached_property
    def samples(self) -> list[tuple[list[int], int]]:
        """What is scored."""
        return texts(self.count)

    @cached_property
    def group_N(self) -> np.ndarray:
        """The group of every token: two samples each."""
        return np.repeat(np.arange(self.count) // 2, [len(ids) - start for ids, start in self.samples])

    def score(self, model: str, numerics: Numerics) -> Values:
        """Log-probabilities of all tokens, float64."""
        key = (model, numerics)
        if key not in self.kept:
            parts = self.models[model].with_numerics(numerics).prefill_logprobs_batch(self.samples)
            self.kept[key] = torch.cat(parts).double().numpy()
        return self.kept[key]

    def values(self, variant: Variant, schedule: Schedule) -> Values:
        """What a side that runs `variant` records."""
        model = "v0" if variant.before or variant.version == 0 else "v1"
        out = self.score(model, replace(self.numerics, schedule=schedule, **variant.changes))
        if variant.round_to is not None:
            out = torch.from_numpy(out).to(getattr(torch, variant.round_to)).double().numpy()
        if variant.lag:
            out = self._shifted(out, variant.lag)
        return out

    def _shifted(self, values_N: Values, lag: int) -> Values:
        out, first = np.full_like(values_N, np.nan), 0
        for ids, start in self.samples:
            part = values_N[first : first + len(ids) - start]
            target = out[first : first + len(part)]
            target[max(0, -lag) : len(part) - max(0, lag)] = part[max(0, lag) : len(part) + min(0, lag)]
            first += len(part)
        return out

    @cached_property
    def variants(self) -> dict[str, Variant]:
        """The family, without what needs experts, kept mass or what the side declares anyway."""
        out = {}
        for one in family([0.8, 1.0], {0: "v0", 1: "v1"}, [1]):
            same = replace(self.numerics, **one.changes).spelled_out() == self.numerics.spelled_out()
            if not one.name.startswith(SKIPPED) and not (
                same and not (one.before or one.version == 0 or one.lag or one.round_to)
            ):
                out[one.name] = one
        return out

    @cached_property
    def predictions(self) -> dict[str, Values]:
        """What every variant predicts."""
        return {name: self.values(one, Schedule()) for name, one in self.variants.items()}


NOTHING = Variant("", "", "")


def judged(bench: Bench, values_N: Values, seed: int) -> Answer:
    """The answer about one run: a seeded half of the groups of `values_N`, and of all predictions."""
    groups = int(bench.group_N.max()) + 1
    chosen = np.random.default_rng(seed).permutation(groups)[: max(8, groups // 2)]
    keep_N = np.isin(bench.group_N, chosen) & ~np.isnan(values_N)
    scored = Scored(
        values_N=values_N[keep_N],
        reference_N=bench.score("v1", replace(bench.numerics, compute="float32"))[keep_N],
        declared_N=bench.values(NOTHING, Schedule())[keep_N],
        placebo_KN=np.stack([bench.values(NOTHING, one)[keep_N] for one in placebo_schedules(8)]),
        variants={name: one[keep_N] for name, one in bench.predictions.items()},
    )

    def combine(wanted: Sequence[tuple[str, str]]) -> dict[str, Values]:
        joined = [bench.variants[left].with_(bench.variants[right]) for left, right in wanted]
        return {one.name: bench.values(one, Schedule())[keep_N] for one in joined if one is not None}

    def repeat(names: Sequence[str]) -> dict[str, Values]:
        return {
            name: np.stack([bench.values(_joined(bench, name), one)[keep_N] for one in placebo_schedules(3)])
            for name in names
        }

    return answer(scored, draw(bench.group_N[keep_N], seed, 400), seed, combine, repeat)


def _joined(bench: Bench, name: str) -> Variant:
    """A variant, or two at once by their joint name."""
    if name in bench.variants:
        return bench.variants[name]
    left, right = name.split(" + ")
    pair = bench.variants[left].with_(bench.variants[right])
    assert pair is not None
    return pair


def told(cause: str, found: Answer, outside: bool) -> str:
    """`right`, `half` (one of two causes), `missed` (seen, not named), `unsure` (could not be told) or `WRONG`."""
    parts = set(cause.split(" + ")) if cause else set()
    if not found.named:
        if not cause or outside:
            return "right"
        seen = any(parts & set(one) for one in found.classes)
        return "missed" if seen and found.answer != "cannot_separate" else "unsure"
    names = set(found.named[0].split(" + ")) | set(found.members)
    alike = {name for part in parts for one in found.classes if part in one for name in one} | parts
    if outside or not cause or not names & alike or not _covered(names, alike):
        return "WRONG"
    return "right" if len(found.named[0].split(" + ")) >= len(parts) else "half"


def _covered(names: set[str], alike: set[str]) -> bool:
    """Whether all that is named stands for some part of the cause."""
    return all(set(name.split(" + ")) <= alike for name in names)


def causes(bench: Bench) -> Iterator[tuple[str, bool, list[Values]]]:
    """(cause, outside the family, what engines of three orders of sums record)."""
    yield "", False, [bench.values(NOTHING, one) for one in ENGINES]
    for name, one in bench.variants.items():
        yield name, False, [bench.values(one, schedule) for schedule in ENGINES]
    both = ("rms_norm rounds as kernel", "swiglu materialises the product")
    if bench.declared == "float32":
        both = ("lm_head=bfloat16", "kv_cache=bfloat16")
    pair = bench.variants[both[0]].with_(bench.variants[both[1]])
    assert pair is not None
    yield pair.name, False, [bench.values(pair, schedule) for schedule in ENGINES]
    for model in bench.models:
        if model not in ("v0", "v1"):
            yield (
                model,
                True,
                [bench.score(model, replace(bench.numerics, schedule=schedule)) for schedule in ENGINES],
            )


def bounds(right: int, total: int) -> tuple[float, float]:
    """Exact two-sided 95 % bounds of a binomial rate (Clopper and Pearson 1934), by bisection."""

    def below(p: float, k: int) -> float:
        return sum(math.comb(total, i) * p**i * (1 - p) ** (total - i) for i in range(k + 1))

    def solve(k: int, tail: float) -> float:
        low, high = 0.0, 1.0
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if below(middle, k) > tail else (low, middle)
        return low

    return (0.0 if right == 0 else solve(right - 1, 0.975), 1.0 if right == total else solve(right, 0.025))


def main(argv: Sequence[str]) -> int:
    """Prints a row a cause and a sum; returns 1 when a name was wrong anywhere."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=9)
    parser.add_argument("--samples", type=int, default=48)
    parser.add_argument("--layers", type=int, nargs="+", default=[4, 24])
    parser.add_argument("--declared", nargs="+", default=["bfloat16", "float32"])
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    wrong = 0
    for layers in options.layers:
        for declared in options.declared:
            bench = Bench(layers, declared, options.samples)
            sums: Counter[str] = Counter()
            print(f"\n{layers} layers, declared {declared}, {options.runs} runs a cause", flush=True)
            for cause, outside, engines in causes(bench):
                runs = [judged(bench, engines[seed % len(engines)], seed) for seed in range(options.runs)]
                counts = Counter(told(cause, one, outside) for one in runs)
                answers = Counter(one.named[0] if one.named else one.answer for one in runs)
                label = f"{'outside: ' if outside else ''}{cause or 'nothing wrong'}"
                print(f"  {label:52} {dict(counts)} {dict(answers)}", flush=True)
                sums += counts
            told_apart = sums["right"] + sums["half"] + sums["missed"] + sums["WRONG"]
            low, high = bounds(sums["right"], told_apart)
            print(
                f"  where the data can tell: right {sums['right']} of {told_apart} [{low:.3f}, {high:.3f}]; "
                f"no name where it cannot: {sums['unsure']}; wrong names: {sums['WRONG']}",
                flush=True,
            )
            wrong += sums["WRONG"]
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
