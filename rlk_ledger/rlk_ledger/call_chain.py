"""The declared order of a decoder's computation, and which captured module is which part of it.

A correspondence says that what one engine hands on under its own module name is a part (or several parts) of the
chain. Each names the test that proves it; one without a proof explains nothing, so that what it would translate stays
unknown. Parts of a layer depend on each other as `INPUTS` says.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from rlk_ledger.boundaries import Tensor

Float32 = npt.NDArray[np.float32]
Cut = Literal["whole", "heads", "sections", "groups", "halves"]

LAYER = (
    "input_norm",
    "q",
    "k",
    "v",
    "q_norm",
    "k_norm",
    "q_rope",
    "k_rope",
    "attention",
    "o_proj",
    "attention_residual",
    "mlp_norm",
    "gate",
    "up",
    "swiglu",
    "down",
    "mlp_residual",
)
"""Parts of a layer in the order in which they are computed."""
ENDS = ("final_norm", "logits", "logprob")
"""Parts after the last layer."""

INPUTS: dict[str, tuple[str, ...]] = {
    "input_norm": ("<",),
    "q": ("input_norm",),
    "k": ("input_norm",),
    "v": ("input_norm",),
    "q_norm": ("q",),
    "k_norm": ("k",),
    "q_rope": ("q_norm",),
    "k_rope": ("k_norm",),
    "attention": ("q_rope", "k_rope", "v"),
    "o_proj": ("attention",),
    "attention_residual": ("o_proj", "<"),
    "mlp_norm": ("attention_residual",),
    "gate": ("mlp_norm",),
    "up": ("mlp_norm",),
    "swiglu": ("gate", "up"),
    "down": ("swiglu",),
    "mlp_residual": ("down", "attention_residual"),
    "final_norm": ("<",),
    "logits": ("final_norm",),
    "logprob": ("logits",),
}
"""What a part is computed from; `<` is what the layer before handed on."""
MIXES_ROWS = frozenset({"attention"})
"""Parts in which a row depends on other rows than its own."""
_PROOF = "tests/ledger/test_divergence.py::"


class Part(NamedTuple):
    """One part of the chain; layer -1 is the embedding, the parts of ENDS come in `layer = LAST`."""

    layer: int
    name: str

    @property
    def text(self) -> str:
        """`layers.2.q`, or the bare name outside layers."""
        return f"layers.{self.layer}.{self.name}" if 0 <= self.layer < LAST else self.name


LAST = 1 << 30
EMBEDDING = Part(-1, "embedding")


def rank(part: Part) -> tuple[int, int]:
    """Sorts parts as they are computed."""
    names = LAYER if 0 <= part.layer < LAST else ENDS
    return part.layer, names.index(part.name) if part.name in names else len(names)


def inputs(part: Part, layers: int) -> list[Part]:
    """The parts a part is computed from, in a model of `layers` layers."""
    out = []
    for name in INPUTS.get(part.name, ()):
        if name != "<":
            out.append(Part(part.layer, name))
            continue
        before = layers - 1 if part.layer == LAST else part.layer - 1
        out.append(Part(before, "mlp_residual") if before >= 0 else EMBEDDING)
    return out


@dataclass(frozen=True)
class Correspondence:
    """Captured `module` (its name's end, `#` for the layer number) at `stage` is the parts `gives` of the chain.

    cut: how its columns divide among the parts: `whole` one part; `heads` one part, the axes after the tokens being
    columns; `sections` one part after the other, each as wide as the other side's; `groups` q, k and v of each
    key-value head side by side; `halves` two equal parts. In a sharded tensor every rank's columns are cut by
    themselves. sequence_first: its leading axes are (position, sample). proof: the test that shows it, None for a
    claim nobody proved. engine: only captures of this engine, None for any.
    """

    name: str
    module: str
    stage: str
    gives: tuple[str, ...]
    cut: Cut = "whole"
    engine: str | None = None
    sequence_first: bool = False
    proof: str | None = None

    def matches(self, tensor: Tensor, engine: str | None) -> Part | None:
        """The first part this tensor stands for, None when it is another module."""
        if tensor.stage != self.stage or (self.engine is not None and self.engine != engine):
            return None
        pattern = re.escape(self.module).replace(r"\#", r"(\d+)")
        found = re.search(rf"(?:^|\.){pattern}$", tensor.boundary)
        if found is None:
            return None
        name = self.gives[0]
        if found.groups():
            return Part(int(found[1]), name)
        return EMBEDDING if name == "embedding" else Part(LAST, name)


_NAMED: tuple[tuple[str, str, str, Cut], ...] = (
    ("embed_tokens", "embedding", "output", "whole"),
    ("layers.#.input_layernorm", "input_norm", "output", "whole"),
    ("layers.#.self_attn.q_proj", "q", "output", "whole"),
    ("layers.#.self_attn.k_proj", "k", "output", "whole"),
    ("layers.#.self_attn.v_proj", "v", "output", "whole"),
    ("layers.#.self_attn.q_norm", "q_norm", "output", "heads"),
    ("layers.#.self_attn.k_norm", "k_norm", "output", "heads"),
    ("layers.#.self_attn.o_proj", "attention", "input", "whole"),
    ("layers.#.self_attn.o_proj", "o_proj", "output", "whole"),
    ("layers.#.post_attention_layernorm", "attention_residual", "input", "whole"),
    ("layers.#.post_attention_layernorm", "mlp_norm", "output", "whole"),
    ("layers.#.mlp.gate_proj", "gate", "output", "whole"),
    ("layers.#.mlp.up_proj", "up", "output", "whole"),
    ("layers.#.mlp.down_proj", "swiglu", "input", "whole"),
    ("layers.#.mlp.down_proj", "down", "output", "whole"),
    ("norm", "final_norm", "output", "whole"),
    ("lm_head", "logits", "output", "whole"),
    *((f"layers.#.{name}", name, "output", "whole") for name in LAYER),  # what says which part it is
    *((name, name, "output", "whole") for name in ("embedding", *ENDS)),
)
"""(module, part, stage, cut) of models named as Llama's, and of captures named after the part itself."""

CORRESPONDENCES: tuple[Correspondence, ...] = (
    Correspondence("vllm.layer_output", "layers.#", "output", ("down",), engine="vllm"),
    Correspondence(
        "layer_output",
        "layers.#",
        "output",
        ("mlp_residual",),
        proof=_PROOF + "test_names_are_places_in_the_chain",
    ),
    Correspondence(
        "fused_qkv.sections",
        "layers.#.self_attn.qkv_proj",
        "output",
        ("q", "k", "v"),
        "sections",
        proof=_PROOF + "test_fused_projections_are_the_three_they_were_made_of",
    ),
    Correspondence(
        "fused_gate_up.halves",
        "layers.#.mlp.gate_up_proj",
        "output",
        ("gate", "up"),
        "halves",
        proof=_PROOF + "test_fused_projections_are_the_three_they_were_made_of",
    ),
    Correspondence(
        "megatron.fused_qkv.groups",
        "layers.#.self_attention.linear_qkv",
        "output",
        ("q", "k", "v"),
        "groups",
        sequence_first=True,
        proof=_PROOF + "test_grouped_qkv_of_sequence_first_tensors_is_the_three_projections",
    ),
    Correspondence(
        "megatron.fc1.halves",
        "layers.#.mlp.linear_fc1",
        "output",
        ("gate", "up"),
        "halves",
        sequence_first=True,
        proof=_PROOF + "test_grouped_qkv_of_sequence_first_tensors_is_the_three_projections",
    ),
    Correspondence("megatron.output_layer", "output_layer", "output", ("logits",), sequence_first=True),
    *(
        Correspondence(
            f"name:{module}", module, stage, (part,), how, proof=_PROOF + "test_names_are_places_in_the_chain"
        )
        for module, part, stage, how in _NAMED
    ),
)
"""Tried in order; the first that matches is meant."""


def corresponding(tensor: Tensor, engine: str | None, rules: Sequence[Correspondence]) -> Correspondence | None:
    """The correspondence a captured tensor falls under, None when no rule names its module."""
    return next((rule for rule in rules if rule.matches(tensor, engine) is not None), None)


def rows_first(values: Float32, tensor: Tensor, rule: Correspondence) -> Float32:
    """The rows of a sequence-first tensor put in batch order; others as they are."""
    if not rule.sequence_first or len(tensor.lead) < 2:
        return values
    positions, samples = tensor.lead[:2]
    return np.ascontiguousarray(values.reshape(positions, samples, -1).swapaxes(0, 1)).reshape(len(values), -1)


def cut(
    tensor: Tensor, rule: Correspondence, widths: Sequence[int | None], head_dim: int | None = None
) -> list[Float32] | str:
    """The values of each part a tensor stands for, or why they cannot be told apart.

    widths: how many columns each part has in all, as the other side recorded them; None where it did not. head_dim:
    columns of one head, which `groups` needs.
    """
    parts = [rows_first(part, tensor, rule) for part in tensor.parts]
    if rule.cut == "heads":
        count = int(np.prod(tensor.lead[:-1], dtype=np.int64))
        return [np.concatenate([part.reshape(count, -1) for part in parts], axis=1)]
    if rule.cut == "whole":
        return [np.concatenate(parts, axis=1)]
    total = sum(part.shape[1] for part in parts)
    known = (
        [total // 2, total - total // 2] if rule.cut == "halves" else [width for width in widths if width is not None]
    )
    if len(known) < len(rule.gives):
        return "fused, and the other side does not show how wide its parts are"
    if sum(known) != total or any(width % len(parts) for width in known):
        return f"fused into {total} columns, which are not the other side's {known}"
    local = [width // len(parts) for width in known]
    if rule.cut == "groups":
        return _grouped(parts, local, head_dim)
    pieces = [np.split(part, np.cumsum(local)[:-1], axis=1) for part in parts]
    return [np.concatenate([piece[i] for piece in pieces], axis=1) for i in range(len(local))]


def _grouped(parts: Sequence[Float32], local: Sequence[int], head_dim: int | None) -> list[Float32] | str:
    """q, k and v where each key-value head's queries, key and value stand side by side."""
    q, k, v = local
    if head_dim is None:
        return "fused by key-value head, and the size of a head is not known; give --head-dim"
    if k != v or q % k or k % head_dim:
        return f"fused by key-value head, which widths {local} and heads of {head_dim} do not allow"
    edge = q // k * head_dim
    out: list[list[Float32]] = [[], [], []]
    for part in parts:
        heads = part.reshape(len(part), k // head_dim, edge + 2 * head_dim)
        for at, (first, end) in enumerate(((0, edge), (edge, edge + head_dim), (edge + head_dim, edge + 2 * head_dim))):
            out[at].append(heads[:, :, first:end].reshape(len(part), -1))
    return [np.concatenate(pieces, axis=1) for pieces in out]
