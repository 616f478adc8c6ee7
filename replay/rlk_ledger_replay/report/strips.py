"""Token strips: a sample's response as cells, one a token, with both sides' values and what they differ by."""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from rlk_ledger.classes import FINITE, MISSING
from rlk_ledger.history import Score
from rlk_ledger.pairs import PairedSample, Pairing
from rlk_ledger_replay.report.drift import unmeasured, worst_pairs
from rlk_ledger_replay.report.tokens import SIGNS, is_bytes, prompt_text, token_text
from rlk_ledger_schemas.metrics import CLIP_EPSILON, VALUE_CLASSES

SAMPLES = 6
WINDOW = 480
"""Tokens shown of one sample; of a longer one the window around its worst token, or its first without a measurement."""

REFERENCES = ("replay:reference-rollout", "replay:reference-training")
LEVELS = (0.01, 0.03, 0.1)
"""Lower edges (nats) of the shades of abs(d) below the clip edge."""
CLIP_LOW, CLIP_HIGH = float(np.log1p(-CLIP_EPSILON)), float(np.log1p(CLIP_EPSILON))

State = Literal["compared", "masked", "unpaired", "unmeasured"]


@dataclass(frozen=True)
class Cell:
    """One token. `level` is 0 to 4 (4: outside the clip band) for a compared token; `line_end` breaks the line.

    `reference` holds the replay's values under the rollout's and under the training's semantics.
    """

    position: int
    text: str
    token_id: int | None
    rollout: float | None
    training: float | None
    dlogp: float | None
    reference: tuple[float | None, float | None]
    level: int
    state: State
    note: str
    line_end: bool

    @property
    def style(self) -> str:
        """The cell's style classes: its shade, why it is outside drift, and the shape of its text."""
        shade = f"l{self.level}" if self.level else ""
        state = "" if self.state == "compared" else self.state
        shape = "s" if self.text in SIGNS else "id" if len(self.text) > 1 or self.text == str(self.token_id) else ""
        return " ".join(part for part in (shade, state, shape) if part)


@dataclass(frozen=True)
class Strip:
    """A sample's cells [first, last) of `length`, its prompt's end as text where tokens are bytes, and its drift.

    The drift is None where no token is compared; `unmeasured` counts active tokens whose value is no measurement.
    """

    sample_id: str
    step: int | None
    group_id: str | None
    engine: str | None
    first: int
    last: int
    length: int
    prompt: str
    rms: float | None
    mean: float | None
    largest: float | None
    tokens: int
    unmeasured: int
    masked: int
    cells: tuple[Cell, ...]


def strips(pairing: Pairing, replay_writer: str = "", count: int = SAMPLES) -> list[Strip]:
    """The strips of the samples that drift most, with the reference's values where `replay_writer` recorded them."""
    pairs = worst_pairs(pairing, count)
    chosen = {pair.sample.key for pair in pairs}
    held = {
        (score.sample_id, score.attempt, score.source): score
        for score in pairing.history.scores
        if score.source in REFERENCES
        and score.writer_id == replay_writer
        and (score.sample_id, score.attempt) in chosen
    }
    return [_strip(pair, [held.get((*pair.sample.key, source)) for source in REFERENCES]) for pair in pairs]


def level(dlogp: float) -> int:
    """The shade of a difference: 0 to 3 by LEVELS, 4 outside the clip band."""
    if dlogp < CLIP_LOW or dlogp > CLIP_HIGH:
        return 4
    return sum(abs(dlogp) >= edge for edge in LEVELS)


def _strip(pair: PairedSample, references: list[Score | None]) -> Strip:
    sample, at = pair.sample, pair.compared
    d = pair.training.astype(np.float64) - pair.rollout
    used, lost = np.abs(d[at]), unmeasured(pair)
    worst = int(np.argmax(lost)) if lost.any() else int(np.flatnonzero(at)[int(np.argmax(used))])
    first, last = _window(len(sample), worst)
    return Strip(
        sample_id=sample.sample_id,
        step=sample.step,
        group_id=sample.group_id,
        engine=sample.engine,
        first=first,
        last=last,
        length=len(sample),
        prompt=prompt_text(sample),
        rms=float(np.sqrt(np.mean(used**2))) if len(used) else None,
        mean=float(used.mean()) if len(used) else None,
        largest=float(used.max()) if len(used) else None,
        tokens=int(at.sum()),
        unmeasured=int(lost.sum()),
        masked=int((~pair.active).sum()),
        cells=tuple(_cell(pair, references, position, float(d[position])) for position in range(first, last)),
    )


def _window(length: int, worst: int) -> tuple[int, int]:
    if length <= WINDOW:
        return 0, length
    first = min(max(worst - WINDOW // 2, 0), length - WINDOW)
    return first, first + WINDOW


def _cell(pair: PairedSample, references: list[Score | None], position: int, d: float) -> Cell:
    compared = bool(pair.compared[position])
    tokens = pair.sample.response_token_ids
    token = int(tokens[position]) if position < len(tokens) else None
    as_bytes = is_bytes(pair.sample)
    state, note = _standing(pair, position)
    return Cell(
        position=position,
        text=token_text(token, as_bytes),
        token_id=token,
        rollout=_value(pair.rollout[position], pair.rollout_class[position]),
        training=_value(pair.training[position], pair.training_class[position]),
        dlogp=d if compared else None,
        reference=(_reference(references[0], position), _reference(references[1], position)),
        level=level(d) if compared else 0,
        state=state,
        note=note,
        line_end=as_bytes and token == 0x0A,
    )


def _standing(pair: PairedSample, position: int) -> tuple[State, str]:
    """Whether a token enters drift, and in words why not."""
    if pair.compared[position]:
        return "compared", ""
    if not pair.active[position]:
        return "masked", "masked: not in the loss"
    codes = pair.rollout_class[position], pair.training_class[position]
    for side, code in zip(("rollout", "training"), codes):
        if code != FINITE:
            return "unmeasured", f"{side} value: {VALUE_CLASSES[code]}"
    return "unpaired", "the sides scored other weight versions"


def _reference(score: Score | None, position: int) -> float | None:
    """The reference's value of a token; None where the replay did not score it."""
    if score is None or not 0 <= position - score.start < len(score.values):
        return None
    value = float(score.values[position - score.start])
    return value if np.isfinite(value) else None


def _value(value: np.float32, code: np.uint8) -> float | None:
    return None if code == MISSING or not np.isfinite(value) else float(value)
