"""The recorder of one vLLM engine."""

import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from rlk_ledger_schemas.errors import UsageError
from rlk_ledger_schemas.fingerprints import token_digest
from rlk_ledger_sdk.api import current, record
from rlk_ledger_sdk.declared import Told, declare
from rlk_ledger_sdk.guard import guarded
from rlk_ledger_sdk.integrations.vllm import loads, names, settings
from rlk_ledger_sdk.integrations.vllm.front import Front
from rlk_ledger_sdk.integrations.vllm.requests import InFlight
from rlk_ledger_sdk.integrations.vllm.samples import UNSET_VERSION, Finished, Identity, Request, record_completion
from rlk_ledger_sdk.integrations.vllm.sampling import LogprobContracts
from rlk_ledger_sdk.integrations.vllm.steps import Steps
from rlk_ledger_sdk.integrations.vllm.versions import Versions
from rlk_ledger_sdk.integrations.vllm.wraps import Wraps

PROMPTS = 8192
"""Prompts remembered, so that one shared by many samples is stored once."""


class Watch:
    """Records one engine until `detach()`; made by `attach`.

    `engine` is the instance name every event carries.
    """

    def __init__(
        self,
        front: Front,
        engine: str,
        *,
        sample_id: Callable[[Any, Any], str] | None,
        group_id: Callable[[Any, Any], str | None] | None,
        loss_mask: Callable[[Any, Any], Sequence[int]] | None,
        requested: Mapping[str, Any],
        weight_version: str | None,
        wire_dtype: str | None,
    ) -> None:
        self.engine = engine
        self.front = front
        self.wraps = Wraps()
        self.in_flight = InFlight()
        self.versions = Versions(weight_version)
        self.wire_dtype = wire_dtype
        self.adapters: dict[str, str] = {}
        """Names of the LoRA adapters in use, by id."""
        self.ready = False
        self._requested = dict(requested)
        self._contracts = LogprobContracts({}, str(front.config.model_config.logprobs_mode))
        self._digest: str | None = None
        self._prompts: OrderedDict[str, str] = OrderedDict()
        self._count = itertools.count()
        self._prefix = str(current().writer() or "")
        self._told = Told()
        self.steps = Steps(engine, self._prefix)
        self._identity = Identity(
            engine=engine,
            model=front.model,
            block_size=front.block_size,
            sample_id=sample_id or self.sample_id,
            group_id=group_id or self._group_id,
            loss_mask=loss_mask,
        )

    def sample_id(self, output: Any, completion: Any) -> str:
        """The sample id of one completion of a RequestOutput, unless `attach` was given another rule.

        `<request id>-<index>`; a request id that is only a number, as vLLM's own count is, carries this process's
        writer id in front. Under another rule this name is the sample's label `request`.
        """
        return names.completion(str(output.request_id), completion.index, self._prefix)

    def record(self, outputs: Any, sampling_params: Any = None) -> list[str]:
        """Records finished completions of one RequestOutput or of several; returns their sample ids.

        For engines that were attached with `wrap=False`. sampling_params: those of all `outputs`, or one per output;
        without them the events carry no sampling and the contract no temperature.
        """
        outputs = [outputs] if hasattr(outputs, "outputs") else list(outputs)
        many = isinstance(sampling_params, Sequence)
        params = list(sampling_params) if many else [sampling_params] * len(outputs)
        if len(params) != len(outputs):
            raise UsageError(f"vllm: record() got {len(outputs)} outputs and {len(params)} sampling parameters.")
        if not current().enabled:
            return [self._identity.sample_id(o, c) for o in outputs for c in o.outputs if c.finish_reason is not None]
        done: list[str] = []
        with guarded("vllm outputs"):
            if not self.front.is_async:
                self.begin()
            for output, one in zip(outputs, params):
                self.in_flight.add(output.request_id, self.request(one))
                done += self.take(output)
        return done

    def weights_loaded(self, version: str, path: str | None = None) -> None:
        """Says what the weights now in the engine are called, and records the digest of what the workers hold.

        path: the checkpoint they were loaded from. For an AsyncLLM use `await watch.weights_loaded_async(...)`.
        """
        if self.front.is_async:
            raise UsageError("vllm: an AsyncLLM answers asynchronously; use `await watch.weights_loaded_async(...)`.")
        self._name(version, path)
        if current().enabled:
            with guarded("vllm weights"):
                self.settle(self.ask("weights"))

    async def weights_loaded_async(self, version: str, path: str | None = None) -> None:
        """The same for an AsyncLLM."""
        self._name(version, path)
        if current().enabled:
            with guarded("vllm weights"):
                self.settle(await self.ask_async("weights"))

    def begin(self) -> None:
        """Reads the running engine where its writer has not been told of it, and the weights it holds."""
        if not self.behind:
            return
        try:
            if not self.ready:
                get = getattr(self.front.engine, "get_weight_version", None)
                self.label_initial(get() if get is not None else None)
                self.describe(self.ask("describe"), self.front.scheduler())
            if self.behind:
                self.settle(self.ask("weights"))
        except Exception:
            self.refused()
            raise

    async def begin_async(self) -> None:
        """The same for an AsyncLLM."""
        try:
            if not self.ready:
                get = getattr(self.front.engine, "get_weight_version", None)
                self.label_initial(await get() if get is not None else None)
                self.describe(await self.ask_async("describe"), await self.front.scheduler_async())
            if self.behind:
                self.settle(await self.ask_async("weights"))
        except Exception:
            self.refused()
            raise

    def notice(self) -> None:
        """Takes note of a writer that began since: it has not heard what the one before was told."""
        if self._told.to_another():
            self.ready, self._digest = False, None
            self._prompts.clear()
            self.versions.unsettled = self.versions.current is not None

    @property
    def behind(self) -> bool:
        """Whether the engine is to be read before its next request: it was not yet, or its weights moved."""
        self.notice()
        return not self.ready or (self.versions.unsettled and self.versions.current is not None)

    def refused(self) -> None:
        """The engine could not be read; it is not asked again before something changes."""
        self.ready, self.versions.unsettled = True, False

    def detach(self) -> None:
        """Stops recording; every method that was wrapped is again what it was."""
        self.wraps.undo()

    def adapter_loaded(self, adapter: Any) -> None:
        """Takes note of a LoRARequest: the next reading of the workers names it."""
        self.adapters[str(adapter.lora_int_id)] = str(adapter.lora_name)
        self.versions.unsettled = True

    def adapter_removed(self, number: int) -> None:
        """Takes note that an adapter is gone."""
        self.adapters.pop(str(number), None)
        self.versions.unsettled = True

    def cut(self, output: Any) -> list[str]:
        """Records what had arrived of a request that ended before it was finished; `output` is the last it gave."""
        return [self._recorded(output, *unfinished) for unfinished in self.in_flight.unfinished(output)]

    @property
    def writer_id(self) -> str:
        """The writer that was recording when this watch was made: what it declared stands in that writer's record."""
        return self._prefix

    def take_over(self, before: "Watch") -> None:
        """Goes on where the watch of the same writer left off: what it said is not said again."""
        before.detach()
        version = self.versions.current
        self.versions, self._digest, self.adapters = before.versions, before._digest, before.adapters
        self.ready, self._contracts = before.ready, before._contracts
        if version is not None:
            self.versions.named(version)

    def request(self, params: Any) -> Request:
        """What is known as a request is added."""
        return Request(params, self.versions.current, self.versions.cache_writer)

    def take(self, output: Any) -> list[str]:
        """Records every completion that `output` finishes."""
        done: list[str] = []
        adapter = getattr(output, "lora_request", None)
        if adapter is not None and self.adapters.get(str(adapter.lora_int_id)) != adapter.lora_name:
            self.adapter_loaded(adapter)
        for completion, request in self.in_flight.finished(output):
            done.append(self._recorded(output, completion, request))
        return done

    def describe(self, answers: Sequence[Mapping[str, Any]] | None, scheduler: Mapping[str, Any]) -> None:
        """Declares the contracts and records the settings of the running engine, once.

        answers: one per worker, or None where workers cannot be asked. scheduler: its settings in force, by path.
        """
        self.ready = True
        mode = str(self.front.config.model_config.logprobs_mode)
        first = answers[0] if answers else {}
        mode = str(first.get("settings", {}).get("sampling.logprobs_mode", mode))
        given = getattr(self.front.config.model_config, "logits_processors", None) or ()
        processors = [str(getattr(one, "__qualname__", one)) for one in given]
        self._contracts = LogprobContracts(first.get("logprob", {}), mode, processors)
        for kind, body in first.get("contracts", {}).items():
            declare(kind, body)
        for fields in first.get("collectives", ()):
            record("collective.observed", **fields)
        requested = {**self.front.given(), **self._requested}
        settings.record_all(self.front.config, requested, {**first.get("settings", {}), **scheduler})

    def settle(self, answers: Sequence[Mapping[str, Any]] | None) -> None:
        """Records what the workers hold under the current version. answers: one per worker; None: not asked."""
        version = self.versions.current
        if version is None or not self.versions.unsettled:
            return
        self.versions.unsettled = False
        if answers is None:
            loads.unobservable("its workers cannot be asked: start them with RLK_VLLM=1 or the worker extension")
            return
        held = loads.added_up(answers)
        loads.record_load(
            version,
            self.engine,
            held,
            before=self._digest,
            caches_flushed=self.versions.caches_flushed,
            path=self.versions.path,
            adapters=[
                {"name": self.adapters.get(number, f"id-{number}"), "digest": digest}
                for number, digest in sorted(held.adapters.items())
            ]
            or None,
        )
        self._digest = held.digest

    def ask(self, question: str) -> list[dict[str, Any]] | None:
        """The answers of every worker to `weights` or `describe`, or None where they cannot be asked."""
        if not self.front.workers_answer:
            return None
        answers: list[dict[str, Any]] = self.front.collective_rpc(
            *self.front.call(question), args=self._arguments(question)
        )
        return answers

    async def ask_async(self, question: str) -> list[dict[str, Any]] | None:
        """The same of an AsyncLLM."""
        if not self.front.workers_answer:
            return None
        call = self.front.collective_rpc(*self.front.call(question), args=self._arguments(question))
        answers: list[dict[str, Any]] = await call
        return answers

    def label_initial(self, version: str | None) -> None:
        """Takes over the version the engine itself reports at the start, when it has one."""
        if version and version != UNSET_VERSION and self.versions.current is None:
            self.versions.named(version)

    def _recorded(self, output: Any, completion: Any, request: Request) -> str:
        name = self.sample_id(output, completion)
        finished = Finished(output, completion, request, self.versions.current, name, self.steps.take(name))
        return record_completion(finished, self._identity, self._contracts, self._prompt(output.prompt_token_ids))

    def _arguments(self, question: str) -> tuple[Any, ...]:
        return (self.wire_dtype,) if question == "weights" else ()

    def _name(self, version: str, path: str | None) -> None:
        self.versions.named(version)
        self.versions.unsettled = True
        if path is not None:
            self.versions.path = path

    def _group_id(self, output: Any, completion: Any) -> str | None:
        """Completions of one request are a group; a request with one completion is in none that vLLM knows of."""
        return self.sample_id(output, completion).rpartition("-")[0] if len(output.outputs) > 1 else None

    def _prompt(self, token_ids: Iterable[int] | None) -> dict[str, Any]:
        """The prompt field of a sample: prompts are stored once and named."""
        if not token_ids:
            return {}
        tokens = token_ids if isinstance(token_ids, list) else list(token_ids)
        digest = token_digest(tokens)
        known = self._prompts.get(digest)
        if known is not None:
            return {"prompt_id": known}
        prompt_id = f"{self._prefix}-{self.engine}-p{next(self._count)}"
        record("prompt.recorded", prompt_id=prompt_id, token_ids=tokens)
        self._prompts[digest] = prompt_id
        if len(self._prompts) > PROMPTS:
            self._prompts.popitem(last=False)
        return {"prompt_id": prompt_id}
