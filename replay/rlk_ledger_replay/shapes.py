"""Every product a decoder will run, for the probe."""

from __future__ import annotations

from rlk_ledger_kernels.ops.linear.torch import leaf_spans, padded_outputs
from rlk_ledger_kernels.ops.selected_logprob.statistics import vocabulary_tiles
from rlk_ledger_kernels.probe import ShapesInUse
from rlk_ledger_replay.checkpoint import ModelConfig
from rlk_ledger_replay.layout import Layout, head_span
from rlk_ledger_replay.numerics import Numerics


def shapes_in_use(config: ModelConfig, numerics: Numerics, layout: Layout) -> ShapesInUse:
    """The products of every rank of `layout`: (K, leaf, outputs), whole or cut, and the heads of attention."""
    h, d, tp = config.hidden, config.head_dim, layout.tp
    span = head_span(config, tp, 0)
    heads, kv_heads = span.q_end - span.q_first, span.kv_end - span.kv_first
    schedules = numerics.leaves()
    pairs = {(h, (heads + 2 * kv_heads) * d, schedules.linear), (heads * d, h, schedules.linear)}
    inner = [config.intermediate] if config.experts is None else [config.intermediate, config.experts.intermediate]
    for width in inner:
        pairs |= {(h, 2 * width // tp, schedules.linear), (width // tp, h, schedules.linear)}
    if config.experts is not None:
        pairs |= {(h, config.experts.count, schedules.linear), (config.experts.count, 16, schedules.linear)}
    tiles = {end - start for start, end in vocabulary_tiles(config.vocabulary, numerics.logprob_contract())}
    pairs |= {(h, width, schedules.head) for width in tiles} | {(width, 16, schedules.head) for width in tiles}
    pairs |= {(width, 16, schedules.norm) for width in ((h, d) if config.qk_norm else (h,))}
    products = {
        (k, start, end, padded_outputs(outputs)) for k, outputs, leaf in pairs for start, end in leaf_spans(k, leaf)
    }
    values = -(-d // 16) * 16 + 16
    return ShapesInUse(products=frozenset(products), heads=(heads // kv_heads, d, values))
