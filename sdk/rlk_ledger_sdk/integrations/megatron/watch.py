"""The recorder of one Megatron rank: what it declares once, its scoring passes, its published weights."""

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from rlk_ledger_schemas.errors import UsageError
from rlk_ledger_sdk.api import record
from rlk_ledger_sdk.declared import Told, declare
from rlk_ledger_sdk.exchange import TIMEOUT_S, collect, give
from rlk_ledger_sdk.guard import guarded
from rlk_ledger_sdk.integrations.megatron import contracts
from rlk_ledger_sdk.integrations.megatron.modules import Stage, unwrap
from rlk_ledger_sdk.integrations.megatron.place import Place, read_place, version
from rlk_ledger_sdk.integrations.megatron.scoring import Scoring, Unwatched, Vocabulary
from rlk_ledger_sdk.integrations.megatron.settings import record_collectives, record_settings
from rlk_ledger_sdk.integrations.megatron.timings import profiled, since_last
from rlk_ledger_sdk.integrations.megatron.weights import Held, held_by_group, held_by_rank, packed
from rlk_ledger_sdk.knobs import read_back
from rlk_ledger_sdk.reference import NOT_RECORDED, Reference


class Watch:
    """What `attach` returns. `place` is None while recording is off, and every call then does nothing."""

    def __init__(
        self,
        engine: str,
        stage: Stage,
        place: Place,
        temperature: float,
        vocabulary: Vocabulary,
        requested: Mapping[str, Any],
    ) -> None:
        self.engine = engine
        self.place = place
        self._stage = stage
        self._requested = dict(requested)
        self._told = Told()
        self._temperature = temperature
        self._vocabulary = vocabulary
        self._layouts = 0
        self._published: dict[str, int] = {}
        self._timed: dict[str, float] = {}

    @contextlib.contextmanager
    def scoring(
        self,
        pass_id: str = "logprob",
        *,
        weight_version: str,
        source: str = "training",
        temperature: float | None = None,
        reduce: bool = False,
        values_follow: bool = False,
    ) -> Iterator[Scoring]:
        """Records the log-probabilities of every micro-batch that is announced and run inside the block.

        pass_id: names the pass ("logprob", "train", ...); passes are separate series. weight_version: the weights the
        model holds now. temperature: what the logits are divided by before the softmax (attach's by default). reduce:
        also compute the values here, by two all-reduces over the tensor group a micro-batch, which every tensor rank
        must then enter; without it nothing is communicated and each rank records its partials. values_follow: the
        caller gives every micro-batch's values to `scored.values`, so a rank that holds the whole vocabulary computes
        nothing of its own.
        """
        self._tell_another()
        heat = self._temperature if temperature is None else temperature
        group = _groups()["tp"] if reduce and self.place.tp.size > 1 else None
        scored = Scoring(
            self,
            self._vocabulary,
            pass_id=pass_id,
            weight_version=weight_version,
            source=source,
            temperature=float(heat),
            group=group,
            values_follow=values_follow,
        )
        with self._hooked(scored):
            yield scored

    @contextlib.contextmanager
    def _hooked(self, scored: Scoring) -> Iterator[None]:
        """The output layer's forward hook, for the length of the block; what it saw is recorded after an error too."""
        model = self._stage.scoring
        handle = None if model is None else model.output_layer.register_forward_hook(_hook(scored))
        try:
            yield
        finally:
            if handle is not None:
                handle.remove()
            with guarded("megatron.scoring"):
                scored.settle()

    def published(
        self,
        weight_version: str,
        path: str | None = None,
        *,
        dtype: Any = None,
        stamp_rule: str | None = None,
        file_digest: str | None = None,
        timeout_s: float = TIMEOUT_S,
    ) -> Reference:
        """Records `weights.published`: the digest of the weights this job holds, under Hugging Face names.

        Every rank calls it, as it would for a checkpoint. The tensor and pipeline ranks of the first data-parallel
        replica leave their integer sums in torch.distributed's key-value store; the first of them adds and records. No
        collective is entered: a rank that gives nothing within `timeout_s` seconds leaves a gap that names it.
        path: where the checkpoint was written, for replay. dtype: the torch dtype the export casts to, when it casts.
        """
        self._tell_another()
        if self.place.dp.rank or self.place.cp.rank:
            return NOT_RECORDED
        with guarded("megatron.published"):
            held = self._held(weight_version, dtype, timeout_s)
            if held is not None:
                return record(
                    "weights.published",
                    weight_version=weight_version,
                    digest=held.digest,
                    tensor_count=len(held.tensors),
                    stamp_rule=stamp_rule,
                    skipped=held.skipped or None,
                    tensors=held.listed(),
                    path=path,
                    file_digest=file_digest,
                )
        return NOT_RECORDED

    def _held(self, weight_version: str, dtype: Any, timeout_s: float) -> Held | None:
        """What the model-parallel group holds, on its first rank; None on the others."""
        own = held_by_rank(self._stage, self.place, self._vocabulary.real, dtype)
        if self.place.tp.size * self.place.pp.size == 1:
            return own
        times = self._published[weight_version] = self._published.get(weight_version, -1) + 1
        key = f"weights/{weight_version}/{times}"
        if self.place.tp.rank or self.place.pp.rank:
            give(key, self.place.rank, packed(own))
            return None
        others = [rank for rank in _members() if rank != self.place.rank]
        return held_by_group([packed(own), *collect(key, others, timeout_s)])

    def timed(self, timers: Any = None) -> int:
        """Records `segment.timed` for what Megatron's timers measured since the last call; returns how many.

        timers: the `megatron.core.timers.Timers` of the job, by default the one in the model's configuration; without
        any nothing is recorded, because nothing was measured.
        """
        timers = getattr(self._stage.first.config, "timers", None) if timers is None else timers
        return _record_all("megatron.timed", lambda: since_last(timers, self._timed, self.place))

    def profiled(self, profile: Any, ranges: Sequence[str]) -> int:
        """Records `segment.timed` for named record_function ranges of a finished torch.profiler; returns how many."""
        return _record_all("megatron.profiled", lambda: profiled(profile, ranges))

    def logprob_contract(self, logits: Any, temperature: float) -> str:
        """The id of the contract under which these logits become log-probabilities, declared when first seen."""
        model = self._stage.scoring
        return declare("logprob", contracts.logprob_body(model, logits, temperature, self._vocabulary[:2]))

    def next_layout(self) -> int:
        """The number of the next micro-batch of this process, counted over all passes."""
        self._layouts += 1
        return self._layouts - 1

    def _tell_another(self) -> None:
        """A writer that began since hears what this rank runs before it hears anything of a pass."""
        if self._told.to_another():
            with guarded("megatron.attach"):
                _record_version()
                self.declare_once()

    def declare_once(self) -> None:
        """Records settings, contracts and collectives of this rank."""
        record_settings(self._stage, self.place, self._requested)
        record_collectives(self._stage, self.place, _groups())
        for kind, body_of in (
            ("norm", contracts.norm_body),
            ("attention", contracts.attention_body),
            ("rope", contracts.rope_body),
        ):
            body = body_of(self._stage.first)
            if body is not None:
                declare(kind, body)


class Off:
    """Stands in for a Watch while recording is off: nothing is wrapped, looked at or communicated."""

    place = None

    @contextlib.contextmanager
    def scoring(self, pass_id: str = "logprob", **options: Any) -> Iterator[Unwatched]:
        """A block that records nothing."""
        yield Unwatched()

    def published(self, weight_version: str, path: str | None = None, **options: Any) -> Reference:
        """Records nothing."""
        return NOT_RECORDED

    def timed(self, timers: Any = None) -> int:
        """Records nothing."""
        return 0

    def profiled(self, profile: Any, ranges: Sequence[str]) -> int:
        """Records nothing."""
        return 0


def attach(
    model: Any,
    engine: str,
    *,
    temperature: float = 1.0,
    vocab_size: int | None = None,
    padded_vocab_policy: str = "include",
    requested: Mapping[str, Any] | None = None,
) -> Watch | Off:
    """Declares this rank (settings, collectives, contracts) and returns its Watch; Off while recording is off.

    model: a GPTModel or a list of chunks, wrapped or not. engine: the instance's name, as in "training-0". temperature:
    what the trainer divides logits by. vocab_size: entries without padding, when the vocabulary is padded.
    padded_vocab_policy: "include" when the softmax sums over the padding too (Megatron's does), "mask" when the trainer
    masks it. requested: settings the user asked for, by the paths of `settings.readings`. A model that is none, or a
    policy that does not exist, is logged and leaves a gap; under `on_error=raise` it raises UsageError.
    """
    with guarded("megatron.attach"):
        opened = _record_version()
        if opened.writer_id is None:
            return Off()
        stage = unwrap(model)
        vocabulary = _vocabulary(int(stage.first.vocab_size), vocab_size, padded_vocab_policy)
        watch = Watch(engine, stage, read_place(), temperature, vocabulary, requested or {})
        watch.declare_once()
        return watch
    return Off()


def _record_version() -> Reference:
    return read_back(
        "megatron.version",
        requested=None,
        actual=version(),
        evidence="megatron.core.__version__",
        lifecycle="build",
    )


def _vocabulary(size: int, real: int | None, policy: str) -> Vocabulary:
    if policy not in ("include", "mask"):
        raise UsageError(f"megatron.attach: padded_vocab_policy is {policy!r}; use include or mask.")
    if real is not None and not 0 < real <= size:
        raise UsageError(f"megatron.attach: vocab_size is {real}, the model has {size} entries; it cannot have fewer.")
    return Vocabulary(size, size if policy == "include" or real is None else real, real or size)


def _record_all(what: str, segments: Callable[[], Iterable[Mapping[str, Any]]]) -> int:
    """Records every segment; returns how many."""
    count = 0
    with guarded(what):
        for fields in segments():
            record("segment.timed", **fields)
            count += 1
    return count


def _hook(scored: Scoring) -> Any:
    """A forward hook that looks and returns nothing, so that the output stays the engine's own object."""

    def look(module: Any, given: Any, output: Any) -> None:
        with guarded("megatron.logprobs"):
            scored.saw_logits(output[0] if isinstance(output, tuple) else output)

    return look


def _groups() -> dict[str, Any]:
    from megatron.core import parallel_state as state

    return {
        "tp": state.get_tensor_model_parallel_group(),
        "cp": state.get_context_parallel_group(),
        "dp": state.get_data_parallel_group(with_context_parallel=True),
    }


def _members() -> list[int]:
    """The global ranks that hold this replica of the model between them."""
    from megatron.core import parallel_state as state

    ranks = sys.modules["torch"].distributed.get_process_group_ranks(state.get_model_parallel_group())
    return [int(rank) for rank in ranks]
