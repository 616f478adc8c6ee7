"""The part of a batch that was sampled under the weights it is scored with: only there is drift defined."""

from array import array
from bisect import bisect_left
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import msgspec

from rlk_ledger_schemas.errors import UsageError
from rlk_ledger_sdk.columns import Columns

Segments = list[tuple[int, int]]


class OnPolicy(msgspec.Struct, frozen=True):
    """Columns of the tokens of one version on both sides, and how many tokens have another or none.

    `segments` are the half-open index ranges of the batch's columns that were kept; None when all were.
    """

    rollout: Any
    training: Any
    missing: tuple[list[int], list[int]]
    segments: Segments | None
    off_policy: int
    unversioned: int

    def original(self, index: int) -> int:
        """The index in the batch's columns of a kept token."""
        for start, end in self.segments or ():
            if index < end - start:
                return start + index
            index -= end - start
        return index


def on_policy(np: Any, cut: Columns, versions: Any, trained: str | None) -> OnPolicy:
    """The tokens of `cut` that `trained` sampled, or of which nobody says who did; raises UsageError.

    versions: None, one weight version for all, or for each sample a version, its weight spans, or None.
    """
    total = sum(cut.counts)
    if versions is None or trained is None:
        return OnPolicy(cut.rollout, cut.training, cut.missing, None, 0, total)
    each = [versions] * len(cut.counts) if isinstance(versions, str) else list(versions)
    if len(each) != len(cut.counts):
        raise UsageError(f"diagnose: {len(each)} rollout_versions for {len(cut.counts)} samples.")
    segments: Segments = []
    unversioned = at = 0
    for i, (count, version) in enumerate(zip(cut.counts, each)):
        spans = _spans(cut, i, version)
        unversioned += count - sum(end - start for _, start, end in spans)
        end_before = 0
        for name, start, end in spans:
            _add(segments, at + end_before, at + (end if name == trained else start))
            end_before = end
        _add(segments, at + end_before, at + count)
        at += count
    off_policy = total - sum(end - start for start, end in segments)
    if not off_policy:
        return OnPolicy(cut.rollout, cut.training, cut.missing, None, 0, unversioned)
    parts = [_part(np, side, segments) for side in (cut.rollout, cut.training)]
    missing = (_moved(cut.missing[0], segments), _moved(cut.missing[1], segments))
    return OnPolicy(parts[0], parts[1], missing, segments, off_policy, unversioned)


def _spans(cut: Columns, sample: int, version: Any) -> list[tuple[str, int, int]]:
    """(version, start, end) over the sample's active tokens, in order; raises UsageError where spans overlap."""
    count = cut.counts[sample]
    if version is None:
        return []
    if isinstance(version, str):
        return [(version, 0, count)]
    row = cut.row(sample)
    out = []
    for span in version:
        name, start, end = (
            (span["version"], span["start"], span["end"])
            if isinstance(span, Mapping)
            else (span.version, span.start, span.end)
        )
        out.append((name, bisect_left(row, start), bisect_left(row, end)))
    out.sort(key=lambda span: span[1:])
    if any(before[2] > after[1] for before, after in pairwise(out)):
        raise UsageError(f"diagnose: the weight spans of sample {sample} overlap.")
    return out


def _add(segments: Segments, start: int, end: int) -> None:
    if start >= end:
        return
    if segments and segments[-1][1] == start:
        segments[-1] = (segments[-1][0], end)
    else:
        segments.append((start, end))


def _part(np: Any, values: Any, segments: Segments) -> Any:
    if np is not None:
        return np.concatenate([values[a:b] for a, b in segments]) if segments else values[:0]
    out = array("f")
    for start, end in segments:
        out.extend(values[start:end])
    return out


def _moved(indices: list[int], segments: Segments) -> list[int]:
    """Where the kept ones of these ascending indices are after everything outside the segments is left out."""
    out: list[int] = []
    before = 0
    for start, end in segments:
        low, high = bisect_left(indices, start), bisect_left(indices, end)
        out += [index - start + before for index in indices[low:high]]
        before += end - start
    return out
