"""Training-data logs of NeMo-RL: `train_data_step<n>.jsonl`, one line a sample.

Every field keeps the batch axis of length 1 it had, and sequences are padded to the longest of the step:
`input_lengths` says where the tokens end. `generation_logprobs` and `prev_logprobs` score token i at entry i. The step
is in the file's name only. Under dynamic sampling `rewards` are those of the samples before filtering, and
`filtered_rewards` the ones that belong to the lines. Nothing in a log says which weights either side used, at which
temperature, or which samples form a group, and a generation log-probability that was not finite may have been replaced
by 0.0 before it was written.
"""

import re
from pathlib import Path
from typing import Any

from rlk_ledger.importers.files import Progress, find, hashed, reading
from rlk_ledger.importers.jsonl import lines
from rlk_ledger.importers.model import ABSENT, DERIVED, MEASURED, Batch, Imported, Source
from rlk_ledger.importers.rows import Row
from rlk_ledger.importers.sequences import response_start, scored

_NEVER = ("weight_spans", "sampling", "engine", "tokenizer", "finish_reason", "status", "group_id", "model", "cache")
_SIDES = (
    ("generation_logprobs", "rollout"),
    ("prev_logprobs", "training"),
    ("reference_policy_logprobs", "reference"),
)
_SEQUENCES = ("token_ids", "token_loss_mask", *(name for name, _ in _SIDES))
_SCALARS = ("input_lengths", "rewards", "filtered_rewards", "sample_loss_mask")


def read(path: Path, progress: Progress) -> Batch:
    """Every log below `path`; raises FormatError or UsageError, one sentence."""
    batch = Batch("nemo-rl")
    seen: dict[str, str] = {}
    for source in hashed(find(path, "train_data_step*.jsonl"), progress):
        step = _step(source)
        with reading(source):
            for number, line in enumerate(lines(source)):
                sample = _sample(_unbatched(line), step, number, source)
                if sample.sample_id in seen:
                    where = seen[sample.sample_id]
                    raise line.fail(f"sample {sample.sample_id} is in {where} too; import each run by itself.")
                seen[sample.sample_id] = f"{source.name}, {line.where}"
                batch.samples.append(sample)
        batch.sources.append(source)
    return batch


def _step(source: Source) -> int | None:
    found = re.search(r"step_?(\d{1,18})\.jsonl$", source.name)
    return int(found[1]) if found else None


def _unbatched(line: Row) -> Row:
    """The line without the batch axis; raises FormatError for a batch of several."""
    out: dict[str, Any] = dict(line.value)
    for name in _SEQUENCES:
        value = out.get(name)
        if type(value) is list and len(value) == 1 and type(value[0]) is list:
            out[name] = value[0]
        elif type(value) is list and value and type(value[0]) is list:
            raise line.fail(f"`{name}` holds {len(value)} sequences; one a line is known.")
    for name in _SCALARS:
        value = out.get(name)
        if type(value) is list:
            if len(value) != 1:
                raise line.fail(f"`{name}` holds {len(value)} entries; one a line is known.")
            out[name] = value[0]
    return Row(out, line.where)


def _sample(row: Row, step: int | None, number: int, origin: Source) -> Imported:
    if "token_ids" not in row:
        raise row.fail(
            "it has no `token_ids`; NeMo-RL logs them since it logs advantages, and without them nothing joins."
        )
    padded = row.ids("token_ids")
    length = row.maybe_count("input_lengths")
    length = len(padded) if length is None else length
    if length > len(padded):
        raise row.fail(f"`input_lengths` is {length} and there are {len(padded)} `token_ids`.")
    tokens = row.mask("token_loss_mask", len(padded))
    if tokens[length:].any():
        raise row.fail(f"`token_loss_mask` trains on padding: `input_lengths` is {length}.")
    start = min(response_start(tokens), length)
    weight = row.maybe_number("sample_loss_mask")
    if weight not in (None, 0.0, 1.0):
        raise row.fail(f"`sample_loss_mask` must be 0 or 1, got {weight}.")
    mask = tokens[start:length] * (0 if weight == 0.0 else 1)
    index = row.maybe_count("idx")
    name = number if index is None else index
    sample = Imported(
        sample_id=f"{step if step is not None else origin.path.stem}-{name}",
        step=step,
        prompt=padded[:start],
        response=padded[start:length],
        mask=mask,
        origin=origin,
        index=index,
        metadata={"prompt_token_ids": DERIVED, "loss_mask": DERIVED, **dict.fromkeys(_NEVER, ABSENT)},
    )
    reward = row.maybe_number("filtered_rewards" if "filtered_rewards" in row else "rewards")
    sample.metadata["reward"] = ABSENT if reward is None else MEASURED
    if reward is not None:
        sample.fields["reward"] = reward
    _score(sample, row, slice(start, length))
    return sample


def _score(sample: Imported, row: Row, cut: slice) -> None:
    for column, source in _SIDES:
        if column in row:
            score = scored(row, column, source, cut, sample.mask, sample.response, sample.origin, source == "rollout")
            score.metadata = {"weight_version": ABSENT, "dtype": ABSENT}
            sample.scores.append(score)
