"""The variants a side is imitated with. A new one is a row here; nothing else knows their names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from rlk_ledger_kernels.dtypes import DType
from rlk_ledger_replay.explain.variant import Variant

NARROW: tuple[DType, ...] = ("bfloat16", "float16")
WIDE: tuple[DType, ...] = ("float32", *NARROW)
MOST_VERSIONS = 6
"""Other weight versions tried, the nearest first: each costs a checkpoint and a scoring."""

_HEAD = (("logprob", "head_dtype"),)
_LOGITS = (("logprob", "logits_dtype"), ("logprob", "downcast_point"))
_ROPE = (("rope", "table_dtype"), ("rope", "cast_point"))
_ATTENTION = (("attention", "downcast_point"), ("attention", "lse_dtype"))
_LINEAR = (("linear", "reduction_contract"), ("logprob", "reduction_dtype"))
_FFN = (("activation", "materialisation_point"),)
_NORM = (("norm", "rounding_order"),)
_RESIDUAL = (("norm", "residual_dtype"), ("norm", "accumulate_dtype"))
_ROUTER = (("router", "dtype"), ("moe", "router_dtype"))


def family(temperatures: Iterable[float], versions: Mapping[int, str], own: Sequence[int]) -> tuple[Variant, ...]:
    """Every variant worth trying on a run.

    temperatures: values declared or sampled with anywhere in it. versions: names of the recorded weight versions by
    index, which is their order; own: those the compared tokens claim.
    """
    return (*_semantic(temperatures), *_weights(versions, own), *_head(), *_body(), *_attention())


def _semantic(temperatures: Iterable[float]) -> list[Variant]:
    out = [
        Variant(
            f"temperature={value:g}",
            "logprob.temperature",
            "distance grows with the entropy of the token's distribution",
            {"temperature": value, "logprob_mode": "processed"},
        )
        for value in sorted({1.0, *temperatures})
    ]
    out.append(
        Variant(
            "top_p renormalised",
            "logprob.support",
            "values too high by the log of the kept probability",
            needs=("kept_mass",),
            kept=True,
        )
    )
    out += [
        Variant(f"lag={lag:+d}", "alignment.lag", "values that belong to the neighbouring token", lag=lag)
        for lag in (-1, 1)
    ]
    return out


def _weights(versions: Mapping[int, str], own: Sequence[int]) -> list[Variant]:
    """Stale weights: each token under the version before its own, or all under one other version."""
    text = "distance as large as one update moves the policy, at every layer"
    out = [Variant("weights one version behind", "weights.version", text, needs=("versions",), before=True)]
    middle = sum(own) / max(1, len(own))
    near = sorted(versions, key=lambda index: (abs(index - middle), index))[:MOST_VERSIONS]
    if len(versions) > 1:
        out += [
            Variant(f"weights of {versions[index]}", "weights.version", text, needs=("versions",), version=index)
            for index in sorted(near)
        ]
    return out


def _head() -> list[Variant]:
    out = []
    for dtype in WIDE:
        out += [
            Variant(
                f"lm_head={dtype}", "logp.head_dtype", "rounding of the head's operands", {"lm_head": dtype}, _HEAD
            ),
            Variant(
                f"logits={dtype}", "logp.downcast_placement", "steps of the logits' dtype", {"logits": dtype}, _LOGITS
            ),
            Variant(
                f"lm_head and logits={dtype}",
                "logp.head_dtype",
                "steps of the logits' dtype and rounding of the head's operands",
                {"lm_head": dtype, "logits": dtype},
                _HEAD,
            ),
        ]
    out += [
        Variant(
            f"log-probability rounded to {dtype}",
            "logp.downcast_placement",
            "values on the grid of the dtype",
            declared_by=_LOGITS,
            round_to=dtype,
        )
        for dtype in NARROW
    ]
    out.append(
        Variant(
            "log-sum-exp merged in bfloat16",
            "logp.lse_merge_order",
            "one error for all tokens of a position's distribution",
            {"lse_state": "bfloat16"},
            (("logprob", "reduction_dtype"), ("logprob", "reduction_order")),
        )
    )
    return out


def _body() -> list[Variant]:
    out = [
        Variant(f"compute={dtype}", "compute.dtype", "rounding after every operator", {"compute": dtype})
        for dtype in WIDE
    ]
    out += [
        Variant(f"residual={dtype}", "norm.rounding_order", "rounding of the stream", {"residual": dtype}, _RESIDUAL)
        for dtype in ("float32", "bfloat16")
    ]
    out += [
        Variant(
            f"rms_norm rounds as {order}",
            "norm.rounding_order",
            "rounding before or after the norm's weight, at every norm",
            {"rms_norm": order},
            _NORM,
        )
        for order in ("hf", "kernel")
    ]
    out += [
        Variant(
            f"swiglu materialises the {point}",
            "gemm.ffn_implementation",
            "rounding of silu(gate) before the product, or not",
            {"swiglu": point},
            _FFN,
        )
        for point in ("activation", "product")
    ]
    out += [
        Variant(
            f"partial sums of {ranks} ranks merged in bfloat16",
            "gemm.forward_reduce",
            "rounding of every rank's share of a row-parallel product",
            {"reduce_ranks": ranks, "reduce_dtype": "bfloat16"},
            _LINEAR,
            ("dense",),
        )
        for ranks in (2, 4)
    ]
    out += [
        Variant(
            f"router={dtype}",
            "moe.router_precision",
            "tokens near a tie take other experts",
            {"router": dtype},
            _ROUTER,
            ("experts",),
        )
        for dtype in ("float32", "bfloat16")
    ]
    return out


def _attention() -> list[Variant]:
    out = []
    for dtype in ("float32", "bfloat16"):
        out += [
            Variant(
                f"rope table={dtype}",
                "attn.rope_fusion",
                "error that grows with position",
                {"rope_table": dtype},
                _ROPE,
            ),
            Variant(
                f"rope arithmetic={dtype}",
                "attn.rope_fusion",
                "rounding of the rotated queries and keys",
                {"rope_arithmetic": dtype},
                _ROPE,
            ),
            Variant(
                f"kv_cache={dtype}",
                "attn.precision_downcast",
                "rounding of keys and values when stored",
                {"kv_cache": dtype},
                (("attention", "kv_cache"), ("attention", "kv_cache_dtype")),
            ),
            Variant(
                f"softmax weights={dtype}",
                "attn.precision_downcast",
                "rounding of P before it multiplies the values",
                {"softmax": dtype},
                _ATTENTION,
            ),
        ]
    out += [
        Variant(
            "split-KV state merged in bfloat16",
            "attn.split_kv",
            "rounding of m, l and o of every split",
            {"attention_merge": "state"},
            (("attention", "merge_order"), ("attention", "split_kv_plan"), *_ATTENTION),
        ),
        Variant(
            "context-parallel outputs merged in bfloat16",
            "attn.cp_merge",
            "rounding of every rank's normalised output",
            {"attention_merge": "output"},
            (("attention", "merge_order"), ("attention", "sequence_ownership"), *_ATTENTION),
        ),
    ]
    return out
