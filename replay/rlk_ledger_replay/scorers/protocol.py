"""What a replay and a scorer's process say to each other: typed frames of msgpack, nothing that executes.

A job is one file. An answer is a sequence of frames, each preceded by its length (8 bytes, little endian): a statement,
then for every pass its values or why it has none. A file cut anywhere still yields its whole frames.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Literal, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

PROTOCOL = 1
LENGTH_BYTES = 8

ExecutionPath = Literal["prefill", "decode"]
Mode = Literal["raw", "processed"]
Status = Literal["passed", "failed", "unknown"]
Padding = Literal["none", "left", "right"]


class TokenSequence(msgspec.Struct, frozen=True):
    """One sequence: ids (int32, little endian) of prompt and response, length of the prompt, its temperature."""

    ids: bytes
    start: int
    temperature: float = 1.0

    @property
    def tokens(self) -> list[int]:
        """The token ids."""
        found: list[int] = np.frombuffer(self.ids, dtype="<i4").tolist()
        return found

    @property
    def scored(self) -> int:
        """How many tokens have a value: the response."""
        return len(self.ids) // 4 - self.start


class Layout(msgspec.Struct, frozen=True):
    """How sequences are batched: indices of those computed together, and on which side shorter ones are padded."""

    name: str
    batches: tuple[tuple[int, ...], ...]
    padding: Padding = "right"


class Pass(msgspec.Struct, frozen=True):
    """One scoring of all sequences of a layout along one execution path."""

    name: str
    path: ExecutionPath
    layout: Layout


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """Everything one process is asked to do: one engine, one checkpoint, one dtype, several passes.

    weights: the `sum64x2` digest of the checkpoint, None where it is not known. dtype: of weights and activations;
    head, logits: of the head's operands and of its product, None where the engine's own stands. mode: `processed`
    values are after the sequence's temperature. settings: what the engine is asked for by name.
    """

    engine: str
    folder: str
    weights: str | None
    dtype: str
    mode: Mode
    sequences: tuple[TokenSequence, ...]
    passes: tuple[Pass, ...]
    head: str | None = None
    logits: str | None = None
    threads: int = 1
    tensor_parallel: int = 1
    settings: dict[str, Any] = {}
    protocol: int = PROTOCOL


class Guard(msgspec.Struct, frozen=True):
    """One condition checked on the live engine: not on what it was asked for."""

    name: str
    status: Status
    reason: str
    evidence: dict[str, Any] = {}


class Knob(msgspec.Struct, frozen=True):
    """One setting: what was asked for and what the live engine says."""

    path: str
    requested: Any
    actual: Any


class Statement(msgspec.Struct, frozen=True, kw_only=True, tag="opened"):
    """What an engine is once it runs: name, version, device, dtypes read back, settings, guards, and how it is read."""

    engine: str
    version: str
    device: str
    dtype: str
    how: dict[str, str] = {}
    knobs: tuple[Knob, ...] = ()
    guards: tuple[Guard, ...] = ()
    protocol: int = PROTOCOL


class Scored(msgspec.Struct, frozen=True, kw_only=True, tag="scored"):
    """The values of one pass: float32 (little endian), the responses of all sequences one after the other.

    NaN stands for sequences the layout leaves out. guards hold for this pass alone.
    """

    name: str
    values: bytes
    guards: tuple[Guard, ...] = ()
    seconds: float = 0.0


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """A pass that has no values: `unsupported` by the engine, or `error` while it ran."""

    name: str
    kind: Literal["unsupported", "error"]
    reason: str


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The engine could not be opened: `missing` is not installed, `unsupported` cannot hold this model so."""

    kind: Literal["missing", "unsupported", "error"]
    reason: str


class Done(msgspec.Struct, frozen=True, tag="done"):
    """Every pass was answered."""


Frame = Statement | Scored | Refused | Failed | Done


class Unsupported(Exception):
    """The engine cannot do what it is asked for; the message says what and why."""


class Engine(Protocol):
    """An engine that is open in this process. It reads weights and never writes them."""

    def statement(self) -> Statement:
        """What really runs."""

    def score(self, task: Pass) -> tuple[Sequence[NDArray[np.float32]], Sequence[Guard]]:
        """Float32 log-probabilities (nats) of every sequence's response, and the pass's guards.

        Sequences outside the layout get NaN. Raises Unsupported where the engine has no such path.
        """


def sequence(ids: Sequence[int] | NDArray[Any], start: int, temperature: float = 1.0) -> TokenSequence:
    """A sequence of token ids whose first `start` are the prompt."""
    return TokenSequence(np.asarray(ids).astype("<i4").tobytes(), start, temperature)


def pack(values: Sequence[NDArray[np.float32]]) -> bytes:
    """Per-sequence float32 values as one string of bytes."""
    return b"".join(np.ascontiguousarray(part, dtype="<f4").tobytes() for part in values)


def unpack(data: bytes, sequences: Sequence[TokenSequence]) -> list[NDArray[np.float32]]:
    """The values by sequence; raises ValueError when their number is not that of the response tokens."""
    sizes = [one.scored for one in sequences]
    if len(data) != 4 * sum(sizes):
        raise ValueError(f"it answered with {len(data) // 4} values for {sum(sizes)} response tokens")
    flat = np.frombuffer(data, dtype="<f4").astype(np.float32)
    return np.split(flat, np.cumsum(sizes)[:-1])


def write_job(job: Job, file: Path) -> None:
    """Writes a job."""
    file.write_bytes(msgspec.msgpack.encode(job))


def read_job(file: Path) -> Job:
    """Reads a job; raises ValueError when the file holds none, or one of another protocol."""
    try:
        job = msgspec.msgpack.decode(file.read_bytes(), type=Job)
    except msgspec.DecodeError as error:
        raise ValueError(f"{file} holds no scoring job ({error})") from None
    if job.protocol != PROTOCOL:
        raise ValueError(
            f"{file} is a job of protocol {job.protocol}, this rlk-ledger speaks {PROTOCOL}: install the same version "
            "beside the engine as beside the replay"
        )
    return job


def write_frame(frame: Frame, file: BinaryIO) -> None:
    """Appends a frame and hands it to the system, so that it outlives this process."""
    data = msgspec.msgpack.encode(frame)
    file.write(len(data).to_bytes(LENGTH_BYTES, "little") + data)
    file.flush()


def read_frames(data: bytes) -> Iterator[Frame]:
    """The whole frames at the beginning of `data`; a cut tail is left out. Raises ValueError for anything else."""
    decoder = msgspec.msgpack.Decoder(Frame)
    at = 0
    while at + LENGTH_BYTES <= len(data):
        size = int.from_bytes(data[at : at + LENGTH_BYTES], "little")
        at += LENGTH_BYTES
        if at + size > len(data):
            return
        try:
            yield decoder.decode(data[at : at + size])
        except msgspec.DecodeError as error:
            raise ValueError(f"its answer is no frame of this protocol ({error})") from None
        at += size


def plain_knobs(found: Mapping[str, tuple[Any, Any]]) -> tuple[Knob, ...]:
    """Settings by path as (requested, actual); values that are not plain become text."""
    return tuple(Knob(path, _plain(asked), _plain(actual)) for path, (asked, actual) in found.items())


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return str(value)
