"""What a side declared about its numbers, as numerics the reference decoder can run.

A side declares semantics (what is computed: temperature, raw or processed) and dtypes (how it is rounded). The
reference keeps the semantics and computes in float32; the imitation keeps both and is what the noise floor is
measured with. What a side declared and the decoder cannot do is listed, never dropped in silence.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

from rlk_ledger_kernels.dtypes import DType
from rlk_ledger_kernels.errors import ContractError
from rlk_ledger_replay.numerics import Numerics
from rlk_ledger_schemas import dtypes

Side = Literal["rollout", "training"]
SIDES: tuple[Side, ...] = get_args(Side)

_DTYPES: tuple[DType, ...] = get_args(DType)
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "top_p": (None, 1, 1.0),
    "top_k": (None, -1, 0),
    "min_p": (None, 0, 0.0),
    "penalties": (None, {}, "none"),
    "alignment": (None, "token_i_given_before_i"),
}
"""Values under which a semantic field changes nothing the decoder would have to imitate."""


@dataclass(frozen=True)
class Declared:
    """One side's declared semantics.

    reference: float32 under the side's semantics. imitation: in its declared dtypes; None while `undeclared` names a
    dtype, because a floor measured under a guessed dtype measures nothing. unsupported: fields whose declared value
    the decoder cannot compute, as `field=value`. assumed: what was taken from elsewhere, field to source.
    """

    side: Side
    reference: Numerics
    imitation: Numerics | None
    undeclared: tuple[str, ...] = ()
    unsupported: tuple[str, ...] = ()
    assumed: Mapping[str, str] = field(default_factory=dict)


def dtype_name(value: Any) -> DType | None:
    """The name of a dtype the decoder computes in, written as `bf16`, `torch.bfloat16`, ...; None for anything else."""
    name = dtypes.dtype_name(value)
    return next((known for known in _DTYPES if known == name), None)


def declared(
    side: Side,
    logprob: Mapping[str, Any],
    others: Iterable[tuple[str, Mapping[str, Any]]] = (),
    *,
    knobs: Mapping[str, Any] | None = None,
    sampling: Mapping[str, Any] | None = None,
) -> Declared:
    """The numerics of one side from its contracts.

    logprob: body of the contract its values name. others: (kind, body) of the other contracts of the same side.
    knobs: path to actual value of its settings. sampling: a sample's recorded sampling parameters, used where the
    contract leaves the temperature out.
    """
    bodies: dict[str, Mapping[str, Any]] = dict(others)
    assumed: dict[str, str] = {}
    unsupported = [
        f"{name}={logprob[name]!r}" for name, fine in _NEUTRAL.items() if name in logprob and logprob[name] not in fine
    ]
    mode = logprob.get("mode", "processed")
    if mode not in ("raw", "processed"):
        unsupported.append(f"mode={mode!r}")
        mode = "processed"
    temperature = _temperature(logprob, sampling or {}, assumed, unsupported)
    reference = Numerics(temperature=temperature, logprob_mode=mode)
    compute = _compute(logprob, bodies, knobs or {}, assumed)
    imitation = None if compute is None else _imitation(reference, compute, logprob, bodies, unsupported)
    undeclared = () if compute is not None else ("compute_dtype",)
    return Declared(side, reference, imitation, undeclared, tuple(unsupported), assumed)


def _temperature(
    logprob: Mapping[str, Any], sampling: Mapping[str, Any], assumed: dict[str, str], unsupported: list[str]
) -> float:
    value = logprob.get("temperature")
    if value is None and sampling.get("temperature") is not None:
        value = sampling["temperature"]
        assumed["temperature"] = "the sample's sampling parameters"
    if value is None:
        assumed["temperature"] = "the default of 1"
        return 1.0
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        unsupported.append(f"temperature={value!r}")
        return 1.0
    return float(value)


def _compute(
    logprob: Mapping[str, Any],
    bodies: Mapping[str, Mapping[str, Any]],
    knobs: Mapping[str, Any],
    assumed: dict[str, str],
) -> DType | None:
    """The dtype of activations: declared in the logprob contract, or what attention or linear hand on."""
    places = (
        ("the logprob contract", logprob.get("compute_dtype")),
        ("the attention contract's output_dtype", bodies.get("attention", {}).get("output_dtype")),
        ("the linear contract's output_dtype", bodies.get("linear", {}).get("output_dtype")),
        ("the setting model.dtype as read back", knobs.get("model.dtype")),
    )
    for place, value in places:
        name = dtype_name(value)
        if name is not None:
            if place != "the logprob contract":
                assumed["compute_dtype"] = place
            return name
    return None


def _imitation(
    reference: Numerics,
    compute: DType,
    logprob: Mapping[str, Any],
    bodies: Mapping[str, Mapping[str, Any]],
    unsupported: list[str],
) -> Numerics | None:
    head, logits = dtype_name(logprob.get("head_dtype")), dtype_name(logprob.get("logits_dtype"))
    order = bodies.get("norm", {}).get("rounding_order", "hf")
    try:
        return replace(
            reference,
            compute=compute,
            lm_head=head or compute,
            logits=logits or head or compute,
            rms_norm=order,
            rope_table=dtype_name(bodies.get("rope", {}).get("table_dtype")),
        )
    except ContractError as error:
        unsupported.append(str(error))
        return None
