"""First divergence: where along the call chain two passes stop agreeing.

Every part of the chain is compared by bits and by size. A difference counts only beyond its floor: what the same part
differs by between two batch layouts of one side (a placebo). Where a part's inputs agree bit for bit in a row, that
row shows what the part alone adds, and is held against the placebo's rows of that kind. What was captured on one side
only, is fused or is cut beyond repair is `unknown`, never equal.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from rlk_ledger.boundaries import Differing, Pass, Tensor
from rlk_ledger.call_chain import CORRESPONDENCES, MIXES_ROWS, Correspondence, Part, corresponding, cut, inputs, rank
from rlk_ledger_schemas.dtypes import dtype_name
from rlk_ledger_schemas.errors import UsageError

Float32 = npt.NDArray[np.float32]
Rows = npt.NDArray[np.bool_]
Status = Literal["equal", "within_floor", "differs", "unknown"]

RATIO = 2.0
"""How many times its floor a difference may be before it counts."""
RARE = 0.01
"""Share of elements that rounding may flip where the placebo flipped none."""
_EPSILON = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-24, "float64": 2.0**-53}


@dataclass(slots=True, eq=False)
class Seen:
    """A part of the chain as one pass shows it; `problem` says why its values cannot be used."""

    values: Float32 | None
    digest: tuple[str, str] | None
    dtype: str | None
    rule: Correspondence | None
    boundary: str
    problem: str | None = None


@dataclass(slots=True, eq=False)
class Compared:
    """One part of the chain in both passes. `rms`, `peak` and `floor` are in the unit of the values.

    inputs: whether what it is computed from agreed (bit for bit, or within the floor), differed, or was not seen.
    """

    part: Part
    status: Status
    reason: str
    inputs: Literal["equal", "within_floor", "differ", "unknown"] = "unknown"
    elements: int = 0
    differing: int = 0
    rms: float | None = None
    peak: float | None = None
    scale: float | None = None
    floor: float | None = None
    dtype: str | None = None
    filtered: tuple[str, ...] = ()
    rows_equal: Rows | None = None
    alone: tuple[int, float, float] | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain values with stable keys."""
        return {
            "boundary": self.part.text,
            "status": self.status,
            "reason": self.reason,
            "inputs": self.inputs,
            "elements": self.elements,
            "differing": self.differing,
            "rms": self.rms,
            "max_abs": self.peak,
            "scale": self.scale,
            "floor": self.floor,
            "dtype": self.dtype,
            "filtered_by": list(self.filtered),
        }


@dataclass(slots=True)
class Divergence:
    """What comparing two passes showed, parts in the order of the chain.

    first: the first part that differs; anchor: the last part before it that agreed; suspects: the parts between them,
    those nobody saw included, that one included.
    """

    left: Pass
    right: Pass
    compared: list[Compared]
    first: Compared | None
    anchor: Part | None
    suspects: list[Part]
    replicas: list[Differing]
    unmapped: list[str]
    floors: bool

    @property
    def first_bits(self) -> Compared | None:
        """The first part whose inputs are equal bit for bit and which is not, whatever its floor allows."""
        return next((c for c in self.compared if c.differing and c.inputs == "equal"), None)

    @property
    def unknown(self) -> list[Compared]:
        """Parts one side captured that could not be compared."""
        return [c for c in self.compared if c.status == "unknown"]

    @property
    def one_engine(self) -> bool:
        """Whether both passes are of one engine, whose layouts then measure all the noise there is between them."""
        return _one_engine(self.left, self.right)

    @property
    def exit_code(self) -> int:
        """1 where a part or a replica differs, 3 where something could not be known, else 0.

        Of two engines the first part that differs is a lead and no proof (3): layouts of one engine do not measure
        what two implementations round differently.
        """
        if self.replicas or (self.first is not None and self.one_engine):
            return 1
        return 3 if self.first is not None or self.unknown or self.unmapped or not self.compared else 0


def compare_passes(
    left: Pass,
    right: Pass,
    placebos: Sequence[tuple[Pass, Pass]] = (),
    rules: Sequence[Correspondence] = CORRESPONDENCES,
    head_dim: int | None = None,
) -> Divergence:
    """Compares two captured passes part by part; `placebos` are pairs of passes of one side in two layouts.

    Raises UsageError when the passes share no sample although both say which samples they hold.
    """
    compared, unmapped = _measure(left, right, rules, head_dim)
    noise = [{c.part: c for c in _measure(a, b, rules, head_dim)[0]} for a, b in placebos]
    sides = {a.place.role for a, _ in placebos}
    held = {c.part: c for c in compared}
    layers = 1 + max((p.layer for p in held if 0 <= p.layer < 1 << 30), default=-1)
    for item in compared:
        _judge(item, [n[item.part] for n in noise if item.part in n], len(sides), _one_engine(left, right))
        if item.status != "unknown":
            item.inputs = _inputs(item.part, held, layers)
    first = next((c for c in compared if c.status == "differs"), None)
    anchor, suspects = (None, []) if first is None else _suspects(first.part, held, layers)
    return Divergence(
        left, right, compared, first, anchor, suspects, [*left.replicas, *right.replicas], unmapped, bool(placebos)
    )


def _one_engine(left: Pass, right: Pass) -> bool:
    return left.engine is not None and left.engine == right.engine


def placebos(passes: Sequence[Pass], chosen: Pass) -> list[tuple[Pass, Pass]]:
    """The chosen pass beside every other of its side and step that holds the same samples in another layout."""
    return [
        (chosen, other)
        for other in passes
        if other is not chosen
        and other.place.role == chosen.place.role
        and other.step == chosen.step
        and other.layout_id != chosen.layout_id
        and chosen.rows is not None
        and other.rows is not None
        and chosen.rows.keys() & other.rows.keys()
    ]


# -- measuring -----------------------------------------------------------------------------------------------------


def _measure(
    left: Pass, right: Pass, rules: Sequence[Correspondence], head_dim: int | None
) -> tuple[list[Compared], list[str]]:
    rows = _shared_rows(left, right)
    widths: dict[Part, int] = {}
    for one in (left, right):
        for tensor in one.tensors:
            rule = corresponding(tensor, one.engine, rules)
            part = rule.matches(tensor, one.engine) if rule is not None else None
            if rule is not None and part is not None and rule.cut == "whole" and tensor.parts:
                widths.setdefault(part, sum(p.shape[1] for p in tensor.parts))
    seen = [_parts(one, rules, widths, head_dim) for one in (left, right)]
    parts = sorted(seen[0][0].keys() | seen[1][0].keys(), key=rank)
    compared = [_compare(part, seen[0][0].get(part), seen[1][0].get(part), rows) for part in parts]
    layers = 1 + max((p.layer for p in parts if 0 <= p.layer < 1 << 30), default=-1)
    held = {c.part: c for c in compared}
    for item, part in zip(compared, parts):
        _alone(item, seen[0][0].get(part), seen[1][0].get(part), rows, held, layers)
    return compared, sorted({*seen[0][1], *seen[1][1]})


def _shared_rows(left: Pass, right: Pass) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]] | None:
    """The row of each side that holds the same token, None where rows compare by place."""
    if left.rows is None or right.rows is None:
        return None
    shared = [name for name in left.rows if name in right.rows]
    if not shared:
        raise UsageError(
            f"passes {left.place.pass_id!r} and {right.place.pass_id!r} share no sample; name two that do."
        )
    spans = [(left.rows[n][0], right.rows[n][0], min(left.rows[n][1], right.rows[n][1])) for n in shared]
    return (
        np.concatenate([np.arange(a, a + size) for a, _, size in spans]),
        np.concatenate([np.arange(b, b + size) for _, b, size in spans]),
    )


def _parts(
    one: Pass, rules: Sequence[Correspondence], widths: dict[Part, int], head_dim: int | None
) -> tuple[dict[Part, Seen], list[str]]:
    """What a pass shows of each part of the chain, and the boundaries that no correspondence names."""
    out: dict[Part, Seen] = {}
    unmapped = []
    for tensor in one.tensors:
        rule = corresponding(tensor, one.engine, rules)
        part = None if rule is None else rule.matches(tensor, one.engine)
        if rule is None or part is None:
            unmapped.append(f"{tensor.boundary} ({tensor.stage})")
            continue
        given = [Part(part.layer, name) for name in rule.gives]
        for name, seen in zip(given, _seen(tensor, rule, [widths.get(p) for p in given], head_dim)):
            out.setdefault(name, seen)
    return out, unmapped


def _seen(tensor: Tensor, rule: Correspondence, widths: list[int | None], head_dim: int | None) -> list[Seen]:
    whole = (tensor.boundary, tensor.digest) if tensor.digest is not None and rule.cut in ("whole", "heads") else None

    def give(values: Float32 | None, problem: str | None) -> Seen:
        return Seen(values, whole, tensor.dtype, rule, tensor.boundary, problem)

    if tensor.problem is not None:
        return [give(None, tensor.problem)] * len(rule.gives)
    if rule.proof is None:
        return [give(None, f"correspondence {rule.name} is not proven")] * len(rule.gives)
    if not tensor.parts:
        return [give(None, None)] * len(rule.gives)
    pieces = cut(tensor, rule, widths, head_dim)
    if isinstance(pieces, str):
        return [give(None, pieces)] * len(rule.gives)
    return [give(values, None) for values in pieces]


def _compare(part: Part, left: Seen | None, right: Seen | None, rows: Any) -> Compared:
    if left is None or right is None:
        return Compared(part, "unknown", f"captured on the {'right' if left is None else 'left'} side only")
    problem = left.problem or right.problem
    if problem is not None:
        return Compared(part, "unknown", problem)
    if left.values is None or right.values is None:
        if left.digest is not None and left.digest == right.digest and left.dtype == right.dtype:
            return Compared(part, "equal", "the digests are equal", dtype=left.dtype)
        return Compared(part, "unknown", "the digests differ, or are of other names; record the values (tensors=True)")
    a, b = _aligned(left.values, right.values, rows)
    if a is None or b is None:
        shapes = f"{list(left.values.shape)} and {list(right.values.shape)}"
        return Compared(part, "unknown", f"shapes {shapes} do not align; record a batch.layout and its layout_id")
    out = _numbers(part, a, b)
    out.dtype = left.dtype if left.dtype == right.dtype else f"{left.dtype} / {right.dtype}"
    out.filtered = _filtered(left, right)
    return out


def _filtered(left: Seen, right: Seen) -> tuple[str, ...]:
    """The proven correspondences without which the two captures would not have been the same thing."""
    if left.boundary == right.boundary and left.rule is right.rule:
        return ()
    return tuple(dict.fromkeys(s.rule.name for s in (left, right) if s.rule is not None))


def _aligned(left: Float32, right: Float32, rows: Any) -> tuple[Float32 | None, Float32 | None]:
    if left.shape[1] != right.shape[1]:
        return None, None
    if rows is None:
        return (left, right) if left.shape == right.shape else (None, None)
    if rows[0].max() >= len(left) or rows[1].max() >= len(right):
        return None, None
    return left[rows[0]], right[rows[1]]


def _numbers(part: Part, a: Float32, b: Float32) -> Compared:
    unequal = np.ascontiguousarray(a).view(np.uint32) != np.ascontiguousarray(b).view(np.uint32)
    differing = int(np.count_nonzero(unequal))
    out = Compared(part, "equal" if differing == 0 else "differs", "", elements=a.size, differing=differing)
    out.rows_equal = ~unequal.any(axis=1)
    with np.errstate(invalid="ignore", over="ignore"):
        gap = np.where(unequal, a.astype(np.float64) - b.astype(np.float64), 0.0)
        out.scale = float(np.sqrt(np.square(b.astype(np.float64)).mean())) if b.size else 0.0
    if not np.isfinite(gap).all():
        out.rms = out.peak = float("inf")
    else:
        out.rms, out.peak = (
            (float(np.sqrt(np.square(gap).mean())), float(np.abs(gap).max())) if gap.size else (0.0, 0.0)
        )
    return out


def _alone(
    item: Compared, left: Seen | None, right: Seen | None, rows: Any, held: dict[Part, Compared], layers: int
) -> None:
    """Notes (rows, rms, share of elements that differ) over the rows in which everything the part reads is equal."""
    if item.rows_equal is None or left is None or right is None or left.values is None or right.values is None:
        return
    sources, mixes = _ancestors(item.part, held, layers)
    known = [held[p].rows_equal for p in sources]
    if not known or any(k is None or len(k) != len(item.rows_equal) for k in known):
        return
    same = np.logical_and.reduce([k for k in known if k is not None])
    if mixes and not same.all():
        return
    if same.any():
        a, b = _aligned(left.values, right.values, rows)
        if a is not None and b is not None:
            one = _numbers(item.part, a[same], b[same])
            item.alone = int(same.sum()), one.rms or 0.0, one.differing / max(1, one.elements)


# -- judging -------------------------------------------------------------------------------------------------------


def _judge(item: Compared, noise: list[Compared], sides: int, one_engine: bool) -> None:
    """Sets status and reason of a part that is not bitwise equal, from its placebos.

    Layouts of one engine share what that engine rounds its own way; between two engines no floor is below a rounding.
    """
    if item.status != "differs" or item.rms is None:
        item.reason = item.reason or ("equal bit for bit" if item.status == "equal" else "")
        return
    measured = [n for n in noise if n.rms is not None]
    if not measured:
        item.reason = "differs bit for bit; no floor was measured"
        return
    # each placebo is the difference of two passes of one side: its mean square over two is that side's own error
    own = [n.rms**2 for n in measured if n.rms is not None]
    item.floor = float(np.sqrt(max(own) if sides < 2 else sum(own) / len(own)))
    unit = _EPSILON.get(dtype_name(item.dtype or "") or "", 2.0**-24) * (item.scale or 0.0)
    least = 0.0 if one_engine else unit
    item.floor = max(item.floor, least)
    alone = [n.alone for n in measured if n.alone is not None]
    if item.alone is not None and alone:
        _, rms, share = item.alone
        usual, flips = max(least, *(a[1] for a in alone)), max(a[2] for a in alone)
        rare = rms <= RATIO * usual or (share <= max(RARE, RATIO * flips) and rms <= unit)
        if not rare:
            item.reason = (
                f"where its inputs are equal bit for bit it differs by {rms:.3g}, between layouts by {usual:.3g}"
            )
            return
    flips = max(n.differing / max(1, n.elements) for n in measured)
    few = item.differing <= max(RARE, RATIO * flips) * item.elements and item.rms <= unit
    if item.rms <= RATIO * item.floor or few:
        item.status, item.reason = "within_floor", f"{_ratio(item)} its floor between layouts"
    else:
        item.reason = f"{_ratio(item)} its floor between layouts"


def _ratio(item: Compared) -> str:
    if not item.floor or item.rms is None:
        return f"{item.differing} of {item.elements} elements differ above"
    return f"{item.rms / item.floor:.2g} times"


def _ancestors(part: Part, held: dict[Part, Compared], layers: int) -> tuple[list[Part], bool]:
    """The nearest parts before `part` that both sides show, and whether rows meet on the way from them."""
    out: list[Part] = []
    mixes = part.name in MIXES_ROWS
    rest = inputs(part, layers)
    done: set[Part] = set()
    while rest:
        one = rest.pop()
        if one in done:
            continue
        done.add(one)
        if one in held and held[one].status != "unknown":
            out.append(one)
            continue
        mixes |= one.name in MIXES_ROWS
        rest += inputs(one, layers)
    return sorted(out, key=rank), mixes


def _inputs(part: Part, held: dict[Part, Compared], layers: int) -> Any:
    sources, _ = _ancestors(part, held, layers)
    states = {held[p].status for p in sources}
    if not states:
        return "unknown"
    return "differ" if "differs" in states else "within_floor" if "within_floor" in states else "equal"


def _suspects(first: Part, held: dict[Part, Compared], layers: int) -> tuple[Part | None, list[Part]]:
    """The last part before `first` on its own path that agreed, and what lies between, in the order of the chain."""
    between, agreed = {first}, []
    rest = inputs(first, layers)
    norms = {p.name for p in held} & {"q_norm", "k_norm"}  # a model without them shows them in no layer
    while rest:
        one = rest.pop()
        if one in between:
            continue
        if one in held and held[one].status in ("equal", "within_floor"):
            agreed.append(one)
            continue
        between.add(one)
        rest += inputs(one, layers)
    real = [p for p in between if p.name not in ("q_norm", "k_norm") or p.name in norms]
    return max(agreed, key=rank, default=None), sorted(real, key=rank)
