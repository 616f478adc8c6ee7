"""Claim: frequencies, attention factors and tables are those of transformers, whatever the scaling; both styles rotate
the pairs they name; a table entry depends on its position alone."""

from __future__ import annotations

import pytest
import torch

from rlk_ledger_kernels.bits import same_bits
from rlk_ledger_kernels.errors import ContractError, OperandError
from rlk_ledger_kernels.ops.rope import reference
from rlk_ledger_kernels.ops.rope import torch as rope_torch
from rlk_ledger_kernels.ops.rope.contract import RopeContract
from rlk_ledger_kernels.ops.rope.scaling import RopeScaling, attention_factor, frequencies
from rlk_ledger_kernels.ops.rope.table import rope_table

HEAD_DIM = 64
LENGTH = 40960
YARN = {"factor": 4.0, "original_max_position_embeddings": 32768}
SCALINGS = [
    ({"rope_type": "linear", "factor": 4.0}, RopeScaling("linear", 4.0)),
    (
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        | {"original_max_position_embeddings": 8192},
        RopeScaling("llama3", 8.0, 1.0, 4.0, 8192),
    ),
    ({"rope_type": "yarn"} | YARN, RopeScaling("yarn", 4.0, original_max_position=32768)),
    (
        {"rope_type": "yarn", "beta_fast": 16.0, "beta_slow": 2.0, "mscale": 1.0, "mscale_all_dim": 0.8} | YARN,
        RopeScaling(
            "yarn",
            4.0,
            original_max_position=32768,
            beta_fast=16.0,
            beta_slow=2.0,
            mscale=1.0,
            mscale_all_dim=0.8,
        ),
    ),
    (
        {"rope_type": "yarn", "attention_factor": 1.25, "truncate": False} | YARN,
        RopeScaling("yarn", 4.0, original_max_position=32768, attention_factor=1.25, truncate=False),
    ),
]


def transformers_parameters(
    fields: dict[str, object], theta: float, positions: int, length: int | None = None
) -> tuple[torch.Tensor, float]:
    from transformers import Qwen3Config
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = Qwen3Config(
        hidden_size=4 * HEAD_DIM,
        num_attention_heads=4,
        head_dim=HEAD_DIM,
        max_position_embeddings=positions,
        rope_parameters={"rope_theta": theta, **fields},
    )
    found: tuple[torch.Tensor, float] = ROPE_INIT_FUNCTIONS[str(fields["rope_type"])](config, "cpu", length)
    return found


@pytest.mark.parametrize("theta", [10000.0, 1e6])
@pytest.mark.parametrize(("fields", "scaling"), SCALINGS, ids=lambda one: getattr(one, "kind", ""))
def test_a_scaling_is_transformers_bit_for_bit(fields: dict[str, object], scaling: RopeScaling, theta: float) -> None:
    expected_F, factor = transformers_parameters(fields, theta, LENGTH)
    torch.testing.assert_close(frequencies(HEAD_DIM, theta, scaling), expected_F, atol=0.0, rtol=1e-7)
    assert attention_factor(scaling) == pytest.approx(factor, rel=1e-15)


@pytest.mark.parametrize("length", [None, 100, 4096, 5000, 20000])
def test_dynamic_scaling_is_transformers_at_a_declared_length(length: int | None) -> None:
    expected_F, factor = transformers_parameters({"rope_type": "dynamic", "factor": 2.0}, 10000.0, 4096, length)
    scaling = RopeScaling("dynamic", 2.0, original_max_position=4096)
    torch.testing.assert_close(frequencies(HEAD_DIM, 10000.0, scaling, length), expected_F, atol=0.0, rtol=1e-7)
    assert (attention_factor(scaling), factor) == (1.0, 1.0)
    trained = length is None or length <= 4096
    assert same_bits(frequencies(HEAD_DIM, 10000.0, scaling, length), frequencies(HEAD_DIM, 10000.0)) is trained


def test_a_rotation_is_the_one_of_transformers_with_yarn() -> None:
    from transformers import Qwen3Config
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding, apply_rotary_pos_emb

    scaling, contract = SCALINGS[2][1], RopeContract()
    config = Qwen3Config(
        hidden_size=2 * HEAD_DIM,
        num_attention_heads=2,
        head_dim=HEAD_DIM,
        max_position_embeddings=LENGTH,
        rope_parameters={"rope_type": "yarn", "rope_theta": 1e6, **YARN},
    )
    positions_N = torch.tensor([0, 1, 17, 4095, 39999])
    q_NHD = torch.randn((5, 2, HEAD_DIM), generator=torch.Generator().manual_seed(0))
    cos, sin = Qwen3RotaryEmbedding(config)(q_NHD, positions_N[None])
    expected, _ = apply_rotary_pos_emb(q_NHD.transpose(0, 1)[None], q_NHD.transpose(0, 1)[None], cos, sin)
    table = rope_table(frequencies(HEAD_DIM, 1e6, scaling), LENGTH, contract, attention_factor(scaling))
    got = rope_torch.rope(q_NHD, table.at(positions_N), contract)
    torch.testing.assert_close(got, expected[0].transpose(0, 1), atol=2e-6, rtol=1e-6)


@pytest.mark.parametrize("rotary", [None, 6])
def test_interleaved_is_half_with_the_pairs_moved_together(rotary: int | None) -> None:
    """The pairs (2i, 2i+1) of a head are (i, i + R/2) of the same head with its elements reordered."""
    turned = rotary or 10
    half, interleaved = (RopeContract(style=style, rotary=rotary) for style in ("half", "interleaved"))
    f = frequencies(turned, 100.0)
    positions_N = torch.arange(30) * 7
    x_NHD = torch.randn((30, 2, 10), generator=torch.Generator().manual_seed(1))
    order = torch.cat((torch.arange(0, turned, 2), torch.arange(1, turned, 2), torch.arange(turned, 10)))
    by_half = rope_torch.rope(x_NHD[..., order], rope_table(f, 300, half).at(positions_N), half)
    by_pairs = rope_torch.rope(x_NHD, rope_table(f, 300, interleaved).at(positions_N), interleaved)
    assert same_bits(by_pairs[..., order], by_half)
    assert same_bits(by_pairs[..., turned:], x_NHD[..., turned:])
    torch.testing.assert_close(
        by_pairs, reference.rope(x_NHD, rope_table(f, 300, interleaved).at(positions_N), interleaved)
    )
    lengths = x_NHD[..., :turned].double().square().sum(-1)
    torch.testing.assert_close(by_pairs[..., :turned].double().square().sum(-1), lengths, atol=1e-5, rtol=1e-5)
    assert not same_bits(by_pairs, rope_torch.rope(x_NHD, rope_table(f, 300, half).at(positions_N), half))


def test_an_entry_depends_on_its_position_alone() -> None:
    f = frequencies(64, 1e6)
    for contract in (RopeContract(), RopeContract(table="bfloat16", style="interleaved")):
        long = rope_table(f, 513, contract, 1.1386)
        for length in (1, 7, 100):
            short = rope_table(f, length, contract, 1.1386)
            assert same_bits(short.cos_PD, long.cos_PD[:length])
            assert same_bits(short.sin_PD, long.sin_PD[:length])


def test_what_cannot_be_kept_is_refused_by_name() -> None:
    with pytest.raises(ContractError, match=r"scaling 'longrope' is not implemented; known are default, linear"):
        frequencies(64, 1e4, RopeScaling("longrope"))
    with pytest.raises(OperandError, match="head_dim is 5"):
        frequencies(5, 1e4)
    with pytest.raises(ContractError, match=r"factor 0\.0"):
        frequencies(64, 1e4, RopeScaling("linear", 0.0))
    with pytest.raises(ContractError, match=r"rope\.rotary is 7"):
        RopeContract(rotary=7)
    with pytest.raises(ContractError, match=r"rope\.style is 'pairs'"):
        RopeContract(style="pairs")  # type: ignore[arg-type]
    with pytest.raises(OperandError, match="turn 64 dimensions, the contract's rotary is 32"):
        rope_table(frequencies(64, 1e4), 4, RopeContract(rotary=32))
    rows = rope_table(frequencies(4, 1e4), 4, RopeContract()).at(torch.tensor([0, 1]))
    with pytest.raises(OperandError, match=r"x is \(2, 1, 8\), the table's rows are \(2, 4\)"):
        rope_torch.rope(torch.zeros(2, 1, 8), rows, RopeContract())
    with pytest.raises(OperandError, match=r"positions must lie in 0\.\.3, got up to -1"):
        rope_table(frequencies(4, 1e4), 4, RopeContract()).at(torch.tensor([2, -1]))
