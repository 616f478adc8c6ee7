"""Sampling parameters as recorded, and the logprob contract that follows from them and the engine's mode."""

from collections.abc import Mapping, Sequence
from typing import Any

from rlk_ledger_sdk.declared import declare

KEPT = 256
"""Contracts remembered: a job may give every request sampling parameters of its own."""
GREEDY = 1e-5
"""vLLM samples greedily below this temperature, and then divides no logits by it."""
_PENALTIES = (("presence", "presence_penalty", 0.0), ("frequency", "frequency_penalty", 0.0))
_REPETITION = ("repetition", "repetition_penalty", 1.0)
_PROCESSORS = (
    "logit_bias",
    "allowed_token_ids",
    "bad_words",
    "structured_outputs",
    "min_tokens",
    "thinking_token_budget",
)


def recorded(params: Any, index: int) -> dict[str, Any]:
    """The `sampling` of completion `index` from vLLM's SamplingParams, every value as it is in force.

    Completions of one request have seeds of their own: vLLM counts up from the one it was given.
    """
    out: dict[str, Any] = {
        "temperature": float(params.temperature),
        "top_p": float(params.top_p),
        "top_k": _top_k(params),
        "min_p": float(params.min_p),
        "n": int(params.n),
    }
    if params.seed is not None:
        out["seed"] = int(params.seed) + index
    penalties = _penalties(params)
    if penalties:
        out["penalties"] = penalties
    return out


class LogprobContracts:
    """Declares each logprob contract once and remembers its id.

    engine: the part the live engine decides (dtypes, vocabulary). mode: vLLM's `logprobs_mode`. processors: names of
    the logits processors the engine was given for every request.
    """

    def __init__(self, engine: Mapping[str, Any], mode: str, processors: Sequence[str] = ()) -> None:
        self.mode = mode
        self.scores = mode.endswith("logprobs")
        """False when the engine returns logits under the name of log-probabilities: those are not recorded as such."""
        self._engine = dict(engine)
        self._processors = list(processors)
        self._ids: dict[tuple[Any, ...], str] = {}

    def of(self, params: Any) -> str:
        """The contract id of values sampled under `params` (None: not known)."""
        key = _key(params) if self.mode.startswith("processed") else ()
        known = self._ids.get(key)
        if known is None:
            if len(self._ids) >= KEPT:
                self._ids.clear()
            known = self._ids[key] = declare("logprob", self.body(params))
        return known

    def body(self, params: Any) -> dict[str, Any]:
        """The contract's body. Raw values are computed before temperature, filters and penalties, so it has none."""
        raw = self.mode.startswith("raw")
        out = {
            "mode": "raw" if raw else "processed",
            **self._engine,
            "alignment": "token_i_given_before_i",
            "execution_path": "decode",
            "downcast_point": "logits",
            "reduction_dtype": "float32",
        }
        if raw:
            return {**out, "temperature": 1.0, "top_p": 1.0, "top_k": -1}
        if params is None:
            return out
        greedy = params.temperature < GREEDY
        out["temperature"] = 1.0 if greedy else float(params.temperature)
        out["top_p"] = float(params.top_p)
        out["top_k"] = _top_k(params)
        if params.min_p:
            out["min_p"] = float(params.min_p)
        penalties = _penalties(params)
        if penalties:
            out["penalties"] = penalties
        processors = [name for name in _PROCESSORS if getattr(params, name, None)] + self._processors
        if processors:
            out["logits_processors"] = processors
        return out


def _top_k(params: Any) -> int:
    return int(params.top_k) if params.top_k > 0 else -1


def _penalties(params: Any) -> dict[str, float]:
    fields = (*_PENALTIES, _REPETITION)
    values = {name: float(getattr(params, field)) for name, field, _ in fields}
    return values if any(values[name] != neutral for name, _, neutral in fields) else {}


def _key(params: Any) -> tuple[Any, ...]:
    if params is None:
        return (None,)
    return (
        params.temperature,
        params.top_p,
        params.top_k,
        params.min_p,
        params.presence_penalty,
        params.frequency_penalty,
        params.repetition_penalty,
        *[bool(getattr(params, name, None)) for name in _PROCESSORS],
    )
