"""How the two engines hand work to each other: whole files, by atomic rename, waited for with a deadline."""

import os
import time
from pathlib import Path

import msgspec

from rlk_ledger_schemas.errors import RlkError

POLL_S = 0.02


class ExchangeTimeout(RlkError, TimeoutError):
    """The other engine did not deliver in time."""


class Rolled(msgspec.Struct, frozen=True):
    """One sample as the trainer receives it; `logprobs` (nats) is null where the policy did not sample the token."""

    sample_id: str
    group_id: str
    prompt: list[int]
    response: list[int]
    loss_mask: list[int]
    logprobs: list[float | None]
    reward: float


class RolledStep(msgspec.Struct, frozen=True):
    """All samples of one step and the weight version that sampled them."""

    step: int
    version: int
    samples: list[Rolled]


def put(path: Path, content: RolledStep) -> None:
    """Writes `content` so that a reader sees all of it or nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    scratch.write_bytes(msgspec.json.encode(content))
    scratch.replace(path)


def take(path: Path, wait_s: float) -> RolledStep:
    """The step in `path`, once it is there; raises ExchangeTimeout."""
    wait_for(path, wait_s)
    return msgspec.json.decode(path.read_bytes(), type=RolledStep)


def wait_for(path: Path, wait_s: float) -> None:
    """Returns once `path` exists; raises ExchangeTimeout after `wait_s` seconds."""
    deadline = time.monotonic() + wait_s
    while not path.exists():
        if time.monotonic() > deadline:
            raise ExchangeTimeout(f"{path} did not appear within {wait_s:g} s; see the other engine's log beside it.")
        time.sleep(POLL_S)


def step_file(work: Path, step: int) -> Path:
    """Where the samples of `step` are handed over."""
    return work / "samples" / f"step-{step:03d}.json"
