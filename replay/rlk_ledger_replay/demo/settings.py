"""What both engines are told: one frozen record, written once as JSON, read by each process."""

from pathlib import Path

import msgspec

from rlk_ledger_replay.demo.faults import Side, fault_named
from rlk_ledger_schemas.errors import UsageError

LIMIT_STEPS = 32


class Numerics(msgspec.Struct, frozen=True):
    """How one side turns hidden states into log-probabilities.

    `temperature` divides the logits; `head_dtype` is the dtype of the head product, the logits and the log-softmax;
    `lag` is how many positions late the training side slices its values (0 is right).
    """

    temperature: float
    head_dtype: str
    lag: int = 0


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """One demo run. Paths are absolute; `steps` policy updates over `groups` x `group_size` samples each.

    `spool` is where both recorders keep what is not shipped yet.
    """

    root: str
    run_id: str
    model: str
    spool: str
    fault: str | None = None
    steps: int = 4
    groups: int = 8
    group_size: int = 4
    seed: int = 0
    temperature: float = 0.7
    learning_rate: float = 2e-4
    clip: float = 0.2
    updates_per_step: int = 2
    generation_batches: tuple[int, ...] = (12, 4, 10, 6)
    score_batch: int = 5
    threads: int = 1
    wait_s: float = 180.0

    def __post_init__(self) -> None:
        if self.fault is not None:
            fault_named(self.fault)
        if not 1 <= self.steps <= LIMIT_STEPS:
            raise UsageError(f"steps is {self.steps}; choose 1 to {LIMIT_STEPS}.")
        if not 0 <= self.seed < 2**31:
            raise UsageError(f"seed is {self.seed}; choose 0 to {2**31 - 1}.")
        if sum(self.generation_batches) != self.groups * self.group_size:
            raise UsageError(
                f"generation batches hold {sum(self.generation_batches)} samples, a step has "
                f"{self.groups * self.group_size}."
            )

    @property
    def ledger(self) -> str:
        """The ledger's URL."""
        return str(Path(self.root) / "ledger")

    @property
    def work(self) -> Path:
        """Files the engines exchange in this run."""
        return Path(self.root) / "work" / self.run_id

    def weights(self, version: int) -> Path:
        """The folder of one published version."""
        return Path(self.root) / "weights" / self.run_id / version_name(version)

    def weights_path(self, version: int) -> str:
        """The same folder as it is recorded: relative to the folder that holds the ledger."""
        return str(self.weights(version).relative_to(self.root))

    def numerics(self, side: Side) -> Numerics:
        """What one side really computes, faults included."""
        head = "bfloat16" if self.fault == "bf16-head" and side == "rollout" else "float32"
        raw = self.fault == "no-temperature" and side == "training"
        late = self.fault == "off-by-one" and side == "training"
        return Numerics(1.0 if raw else self.temperature, head, 1 if late else 0)


def version_name(version: int) -> str:
    """The recorded name of a weight version."""
    return f"v{version}"


def write_settings(settings: Settings) -> Path:
    """Writes the settings into the run's work folder; returns the file."""
    settings.work.mkdir(parents=True, exist_ok=False)
    path = settings.work / "settings.json"
    path.write_bytes(msgspec.json.encode(settings))
    return path


def read_settings(path: str | Path) -> Settings:
    """The settings in a file; raises UsageError when it does not hold any."""
    try:
        return msgspec.json.decode(Path(path).read_bytes(), type=Settings)
    except (OSError, msgspec.DecodeError) as error:
        raise UsageError(f"{path} does not hold demo settings ({error}); the demo command writes it.") from None
