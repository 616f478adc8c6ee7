"""The debug dumps of slime and of the frameworks that grew from it (vime, miles).

    rollout_data/<rollout_id>.pt        {"rollout_id", "samples": [one mapping a sample]}
    train_data/<rollout_id>.pt          {"format_version": 2, "rollout_id", "samples": [...], "dp_shards": [...]}
    train_data/<rollout_id>_<rank>.pt   {"rollout_id", "rank", "samples": [...]}, or columns: "rollout_data": {...}

A file is known by what it holds, not by its name; only evaluation dumps are told by theirs (`eval_`), because nothing
in them says so. Rollout values are Python floats, 0.0 where a tool wrote the token; training values are tensors.
"""

import re
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlk_ledger.importers.files import Progress, find, hashed, reading
from rlk_ledger.importers.joining import TrainRow
from rlk_ledger.importers.model import Batch, Imported, Source
from rlk_ledger.importers.rollout_rows import read_sample
from rlk_ledger.importers.rows import Row
from rlk_ledger.importers.steps import assemble
from rlk_ledger.importers.torch_files import TorchFile
from rlk_ledger.importers.train_rows import columns, read_row, read_shard
from rlk_ledger_schemas.errors import FormatError

_VERSIONS = (1, 2)
_EVALUATION = re.compile(r"(?<![a-z])eval_\d")


@dataclass(slots=True)
class Step:
    """What the files of one rollout id hold; `shards` are (data-parallel layout, its file)."""

    number: int
    rollout: Source | None = None
    samples: list[Imported] = field(default_factory=list)
    rows: list[TrainRow] = field(default_factory=list)
    shards: list[tuple[dict[str, Any], Source]] = field(default_factory=list)
    ranks: set[int] = field(default_factory=set)


def read(format_name: str, path: Path, progress: Progress) -> Batch:
    """Every dump below `path`; raises FormatError or UsageError, one sentence, before anything is written."""
    files = find(path, "*.pt")
    evaluation = [name for _, name in files if _EVALUATION.search(Path(name).name)]
    kept = [(file, name) for file, name in files if name not in evaluation]
    batch = Batch(format_name)
    if evaluation:
        many = f"{len(evaluation)} evaluation dumps were left out: nobody trains on them."
        batch.notes.append("1 evaluation dump was left out: nobody trains on it." if len(evaluation) == 1 else many)
    steps: dict[int, Step] = {}
    for source in hashed(kept, progress):
        with reading(source):
            if _read_file(source, steps):
                batch.sources.append(source)
            elif path.is_file():
                raise FormatError("it is a file of torch.save, but no rollout or train dump.")
            else:
                batch.notes.append(f"{source.name} was left out: it is no rollout or train dump.")
    if not batch.sources:
        raise FormatError(f"{path}: none of its {len(files)} files is a rollout or train dump.")
    for number in sorted(steps):
        assemble(batch, steps[number])
    return batch


def _read_file(source: Source, steps: dict[int, Step]) -> bool:
    """Adds what one file holds to its step; False when it is no dump."""
    with TorchFile(source.path) as file:
        if type(file.value) is not dict or not {"samples", "rollout_data"} & file.value.keys():
            return False
        top = Row(file.value, "it")
        number = top.count("rollout_id")
        step = steps.setdefault(number, Step(number))
        version = top.maybe_count("format_version")
        if version is not None and version not in _VERSIONS:
            raise FormatError(f"its `format_version` is {version}; versions 1 and 2 are known.")
        if "rollout_data" in top:
            _train(step, top, columns(Row(top.get("rollout_data"), "rollout_data")), source)
        elif {"rank", "format_version", "dp_shards"} & file.value.keys():
            _train(step, top, top.rows("samples"), source)
        else:
            _rollout(step, top, source)
    return True


def _rollout(step: Step, top: Row, source: Source) -> None:
    if step.rollout is not None:
        first = step.rollout.name
        raise FormatError(
            f"it is a second rollout dump of step {step.number}, after {first}; import each into its own run."
        )
    step.rollout = source
    seen: dict[int | None, int] = defaultdict(int)
    for number, value in enumerate(top.rows("samples")):
        row = Row(value, f"samples[{number}]")
        sample = read_sample(row, step.number, number, source)
        sample.sample_id += f"-{seen[sample.index]}" if sample.index is not None and seen[sample.index] else ""
        seen[sample.index] += 1
        step.samples.append(sample)


def _train(step: Step, top: Row, values: list[Any], source: Source) -> None:
    rank = top.maybe_count("rank")
    if rank is not None and "dp_shards" not in top:
        step.ranks.add(rank)
    for number, value in enumerate(values):
        step.rows.append(read_row(Row(value, f"samples[{number}]"), rank, source))
    held = top.get("rollout_data")
    for number, shard in enumerate(top.rows("dp_shards") if "dp_shards" in top else [held] if held else []):
        step.shards.append((read_shard(Row(shard, f"dp_shards[{number}]"), rank), source))
