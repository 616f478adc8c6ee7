"""torch: what its determinism switches really say, boundaries of a forward pass, selected log-probabilities.

Nothing here imports torch: it is taken from `sys.modules`, where whoever hands a model or a tensor has put it.
"""

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import Any

from rlk_ledger_schemas.fingerprints import sum64x2_digest
from rlk_ledger_sdk.api import record, recording
from rlk_ledger_sdk.guard import guarded
from rlk_ledger_sdk.knobs import UNOBSERVABLE, read_back
from rlk_ledger_sdk.weights import sum64x2

LAYERS = ("*embed_tokens", "*layers.*", "*norm")
"""The boundaries of a Llama-like model, whatever it is wrapped in: embeddings, every decoder layer, the final norm."""
OPERATORS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "*embed_tokens": ("output",),
        "*input_layernorm": ("output",),
        "*q_proj": ("output",),
        "*k_proj": ("output",),
        "*v_proj": ("output",),
        "*qkv_proj": ("output",),
        "*q_norm": ("output",),
        "*k_norm": ("output",),
        "*o_proj": ("input", "output"),
        "*post_attention_layernorm": ("input", "output"),
        "*gate_proj": ("output",),
        "*up_proj": ("output",),
        "*gate_up_proj": ("output",),
        "*down_proj": ("input", "output"),
        "*layers.*": ("output",),
        "*norm": ("output",),
        "*lm_head": ("output",),
    }
)
"""The operators of a Llama-like model, each with what is taken of it: `rlk-ledger divergence` names one of them."""
_CUBLAS = "CUBLAS_WORKSPACE_CONFIG"


def short_dtype(dtype: Any) -> str:
    """`bfloat16` for `torch.bfloat16`."""
    return str(dtype).removeprefix("torch.")


def record_determinism(requested: Mapping[str, Any] | None = None) -> None:
    """Records what torch's determinism and precision switches say now, one `knob.applied` each.

    requested: what the job asked for, under the paths recorded here (`torch.deterministic_algorithms`,
    `torch.num_threads`, `torch.float32_matmul_precision` ...); a switch without an entry was left to torch.
    """
    torch = sys.modules.get("torch")
    if torch is None or not recording():
        return
    asked = dict(requested or {})
    with guarded("torch determinism"):
        for path, read in _SWITCHES.items():
            read_back(
                path,
                requested=asked.get(path),
                actual=_read(read, torch),
                evidence="torch's own accessor",
                lifecycle="process",
            )
        if os.environ.get(_CUBLAS) is not None or _CUBLAS in asked:
            variable = os.environ.get(_CUBLAS)
            read_back(
                f"cublas.{_CUBLAS}",
                requested=asked.get(_CUBLAS, variable),
                materialized=variable,
                actual=UNOBSERVABLE,
                evidence="environment variable; cuBLAS reads it once and shows it nowhere",
                lifecycle="process",
            )


def _read(read: Callable[[Any], Any], torch: Any) -> Any:
    """A switch, or UNOBSERVABLE where this build of torch has none or refuses to say."""
    try:
        return read(torch)
    except (AttributeError, RuntimeError, TypeError):
        return UNOBSERVABLE


def _autocast(torch: Any) -> Any:
    """The dtype autocast is computing in, by device type, or False."""
    on = {}
    for device in ("cpu", "cuda"):
        if torch.is_autocast_enabled(device):
            on[device] = short_dtype(torch.get_autocast_dtype(device))
    return on or False


_SWITCHES: dict[str, Callable[[Any], Any]] = {
    "torch.deterministic_algorithms": lambda torch: bool(torch.are_deterministic_algorithms_enabled()),
    "torch.deterministic_warn_only": lambda torch: bool(torch.is_deterministic_algorithms_warn_only_enabled()),
    "torch.cudnn_deterministic": lambda torch: bool(torch.backends.cudnn.deterministic),
    "torch.cudnn_benchmark": lambda torch: bool(torch.backends.cudnn.benchmark),
    "torch.cudnn_tf32": lambda torch: bool(torch.backends.cudnn.allow_tf32),
    "torch.matmul_tf32": lambda torch: bool(torch.backends.cuda.matmul.allow_tf32),
    "torch.matmul_bf16_reduced_precision": lambda torch: bool(
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction
    ),
    "torch.float32_matmul_precision": lambda torch: str(torch.get_float32_matmul_precision()),
    "torch.autocast": _autocast,
    "torch.num_threads": lambda torch: int(torch.get_num_threads()),
}


def selected_logprobs(logits: Any, token_ids: Any, temperature: float = 1.0, chunk: int = 256) -> Any:
    """Log-probabilities (nats, float32) of `token_ids` under softmax(logits / temperature).

    logits: [..., V], any floating dtype, widened to float32 before the division. token_ids: [...]. chunk: rows widened
    at once, which bounds the temporary memory at a few times chunk x V x 4 bytes. Returns float32 [...].
    """
    torch = sys.modules["torch"]
    rows, wanted = logits.reshape(-1, logits.shape[-1]), token_ids.reshape(-1, 1)
    out = torch.empty(rows.shape[0], dtype=torch.float32, device=logits.device)
    for low in range(0, rows.shape[0], chunk):
        part = rows[low : low + chunk].float()
        if temperature != 1.0:
            part = part / temperature
        out[low : low + chunk] = torch.log_softmax(part, -1).gather(1, wanted[low : low + chunk])[:, 0]
    return out.reshape(token_ids.shape)


Placed = Callable[[str, str], Mapping[str, Any]]
"""(module name, stage) -> fields of that one boundary."""


class Boundaries:
    """Hooks on the chosen modules of one model; `remove()`, or the end of the `with` block, takes them off."""

    def __init__(self, pass_id: str | None, fields: Mapping[str, Any], tensors: bool, placed: Placed | None) -> None:
        self._handles: list[Any] = []
        self._pass, self._fields, self._tensors, self._placed = pass_id, dict(fields), tensors, placed
        self._modules = 0
        self._forward, self._order = -1, 0

    def __enter__(self) -> "Boundaries":
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def __len__(self) -> int:
        """How many modules are hooked."""
        return self._modules if self._handles else 0

    def remove(self) -> None:
        """Takes every hook off; a second call does nothing."""
        while self._handles:
            self._handles.pop().remove()

    def _watch(self, model: Any, chosen: Sequence[tuple[str, Any, tuple[str, ...]]]) -> None:
        self._handles.append(model.register_forward_pre_hook(self._begin))
        self._modules = len(chosen)
        for name, module, stages in chosen:
            if "input" in stages:
                self._handles.append(module.register_forward_pre_hook(self._before(name)))
            if "output" in stages:
                self._handles.append(module.register_forward_hook(self._hook(name)))

    def _begin(self, *_: object) -> None:
        """A forward pass of the whole model begins: its boundaries count from 0."""
        self._forward, self._order = self._forward + 1, 0

    def _hook(self, name: str) -> Callable[..., None]:
        def captured(module: Any, inputs: Any, output: Any) -> None:
            if not _compiling():
                with guarded(f"boundary {name}"):
                    self._record(name, "output", output)

        return captured

    def _before(self, name: str) -> Callable[..., None]:
        def captured(module: Any, inputs: Any) -> None:
            if not _compiling():
                with guarded(f"boundary {name}"):
                    self._record(name, "input", inputs)

        return captured

    def _record(self, name: str, stage: str, output: Any) -> None:
        tensor = _first_tensor(output)
        if tensor is None:
            return
        held = tensor.detach()
        order, self._order = self._order, self._order + 1
        record(
            "boundary.captured",
            boundary=name,
            order=order,
            layer=_layer(name),
            stage=stage,
            digest=sum64x2_digest([sum64x2(name, held)]),
            dtype=short_dtype(held.dtype),
            shape=list(held.shape),
            pass_id=f"{self._pass or 'forward'}/{max(self._forward, 0)}",
            values=held.float().reshape(-1).cpu() if self._tensors else None,
            **{**self._fields, **(self._placed(name, stage) if self._placed is not None else {})},
        )


def capture_boundaries(
    model: Any,
    modules: Sequence[str] | Mapping[str, Sequence[str]] = LAYERS,
    *,
    pass_id: str | None = None,
    tensors: bool = False,
    placed: Placed | None = None,
    **fields: Any,
) -> Boundaries:
    """Records a `boundary.captured` for every forward pass of the chosen modules until `remove()`.

    modules: names as `named_modules()` gives them, each dotted part a glob (`model.layers.*` is every layer and
    nothing inside it; a leading `*` stands for any number of parts). A mapping says of each glob whether the module's
    first positional `input`, its `output` or both are taken; see OPERATORS. tensors: also keep the values as float32.
    placed: called with (module name, stage), gives the fields that hold for it alone: `feature_range` or `shard` of a
    tensor this rank holds a part of. fields: more fields of every event (`layout_id`, `contract_ids` ...). The hooks
    return nothing, so no value changes; each reads its tensor once. Inside torch.compile they record nothing. With
    recording off nothing is hooked.
    """
    boundaries = Boundaries(pass_id, fields, tensors, placed)
    if recording():
        with guarded("torch boundaries"):
            globs = dict(modules) if isinstance(modules, Mapping) else dict.fromkeys(modules, ("output",))
            named = [(n, m, _stages(n, globs)) for n, m in model.named_modules() if n]
            boundaries._watch(model, [one for one in named if one[2]])
    return boundaries


def _stages(name: str, globs: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
    """What is taken of a module: the stages of every glob its name matches."""
    return tuple(sorted({stage for glob, stages in globs.items() if _matches(name, glob) for stage in stages}))


def _matches(name: str, glob: str) -> bool:
    parts, wanted = name.split("."), glob.split(".")
    if wanted[0].startswith("*"):
        wanted[0] = wanted[0][1:] or "*"
        parts = parts[-len(wanted) :]
    return len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted))


def _layer(name: str) -> int | None:
    """The number after `layers`, `blocks` or `h` in a dotted name, else its first number."""
    parts = name.split(".")
    numbers = [(i, int(part)) for i, part in enumerate(parts) if part.isdigit()]
    inside = [n for i, n in numbers if i and parts[i - 1] in ("layers", "blocks", "h")]
    return next(iter(inside or [n for _, n in numbers]), None)


def _first_tensor(output: Any) -> Any:
    if hasattr(output, "detach"):
        return output
    for part in output.values() if isinstance(output, Mapping) else output if isinstance(output, list | tuple) else ():
        if hasattr(part, "detach"):
            return part
    return None


def _compiling() -> bool:
    compiler = getattr(sys.modules.get("torch"), "compiler", None)
    return bool(compiler is not None and compiler.is_compiling())
