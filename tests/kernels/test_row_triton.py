"""Claims about the row operators' Triton kernels, in the interpreter: copies and elementwise operators give the torch
backend's bits, a tile's size changes none, odd and empty shapes and non-finite values are handled as torch does."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch

pytest.importorskip("triton")

from rlk_ledger_kernels import triton_language
from rlk_ledger_kernels.bits import same_bits
from rlk_ledger_kernels.dtypes import DType, torch_dtype
from rlk_ledger_kernels.errors import OperandError
from rlk_ledger_kernels.ops.embedding import torch as embedding_torch
from rlk_ledger_kernels.ops.embedding import triton as embedding_triton
from rlk_ledger_kernels.ops.embedding.shard import merge_embedding
from rlk_ledger_kernels.ops.linear.torch import row_sum
from rlk_ledger_kernels.ops.masked_mean import triton as masked_triton
from rlk_ledger_kernels.ops.rms_norm import torch as norm_torch
from rlk_ledger_kernels.ops.rms_norm import triton as norm_triton
from rlk_ledger_kernels.ops.rms_norm.contract import RmsNormContract
from rlk_ledger_kernels.ops.rope import torch as rope_torch
from rlk_ledger_kernels.ops.rope import triton as rope_triton
from rlk_ledger_kernels.ops.rope.contract import RopeContract
from rlk_ledger_kernels.ops.rope.table import frequencies, rope_table
from rlk_ledger_kernels.ops.swiglu import torch as swiglu_torch
from rlk_ledger_kernels.ops.swiglu import triton as swiglu_triton
from rlk_ledger_kernels.ops.swiglu.contract import SwigluContract
from rlk_ledger_kernels.schedule import Schedule, placebo_schedules

DTYPES: tuple[DType, ...] = ("float32", "bfloat16", "float16")
NAN, INF = float("nan"), float("inf")


@pytest.fixture(autouse=True)
def quiet_interpreter() -> Iterator[None]:
    """The interpreter computes with numpy, which warns where IEEE arithmetic gives NaN or an infinity."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        yield


def draw(seed: int, *shape: int, dtype: DType = "float32") -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(torch_dtype(dtype))


def in_small_tiles(monkeypatch: pytest.MonkeyPatch, elements: int = 256) -> None:
    monkeypatch.setattr(triton_language, "_TILE_ELEMENTS", elements)


@pytest.mark.parametrize("style", ["half", "interleaved"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rope_has_the_bits_of_torch_forward_and_backward(dtype: DType, style: str) -> None:
    for head_dim, rotary, arithmetic in ((34, None, dtype), (10, 6, dtype), (2, None, "float32")):
        contract = RopeContract(dtype, arithmetic, style, rotary, output=dtype)  # type: ignore[arg-type]
        table = rope_table(frequencies(rotary or head_dim, 1e4), 200, contract)
        rows = table.at(torch.randint(0, 200, (41,), generator=torch.Generator().manual_seed(1)))
        x = draw(2, 41, 3, head_dim, dtype=dtype)
        x[3, 0, 0], x[4], x[5] = NAN, INF, -0.0
        assert same_bits(
            rope_triton.rope(x, rows, contract).nan_to_num(9.0), rope_torch.rope(x, rows, contract).nan_to_num(9.0)
        )
        grad = draw(3, 41, 3, head_dim, dtype=dtype)
        expected = rope_torch.rope_backward(grad, rows, contract)
        assert same_bits(rope_triton.rope_backward(grad, rows, contract), expected)


def test_rope_reads_heads_where_they_lie() -> None:
    """Queries are a slice of a wider product: strided rows give the bits of contiguous ones."""
    wide = draw(1, 20, 5, 16)
    contract = RopeContract()
    rows = rope_table(frequencies(16, 1e4), 20, contract).at(torch.arange(20))
    got = rope_triton.rope(wide[:, 1:4], rows, contract)
    assert same_bits(got, rope_triton.rope(wide[:, 1:4].contiguous(), rows, contract))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_embedding_copies_every_bit_pattern_whole_and_sharded(dtype: torch.dtype) -> None:
    table = torch.randn((50, 13), generator=torch.Generator().manual_seed(0)).to(dtype)
    table[3], table[4], table[5] = -0.0, NAN, -INF
    ids = torch.randint(0, 50, (133,), generator=torch.Generator().manual_seed(1))
    ids[:6] = torch.arange(6)
    firsts, ends = (0, 4, 30), (4, 30, 50)
    for module in (embedding_torch, embedding_triton):
        assert same_bits(module.embedding(ids, table), table[ids])
        parts = [module.embedding_shard(ids, table[a:b], a) for a, b in zip(firsts, ends, strict=True)]
        assert same_bits(merge_embedding(parts, ids, firsts), table[ids])
        outside = parts[0][ids >= 4]
        assert same_bits(outside, torch.zeros_like(outside))
        summed = sum(parts[1:], parts[0])
        assert not same_bits(summed, table[ids])  # what merging by a sum would do to -0


def test_embedding_refuses_ids_and_shards_that_do_not_fit() -> None:
    for module in (embedding_torch, embedding_triton):
        with pytest.raises(OperandError, match=r"token id 30 at row 1 is outside 0\.\.29"):
            module.embedding(torch.tensor([0, 30]), torch.zeros(30, 4))
        with pytest.raises(OperandError, match="pass int64"):
            module.embedding(torch.tensor([0.0]), torch.zeros(30, 4))
    part = torch.zeros(1, 4)
    with pytest.raises(OperandError, match=r"2 parts of shards that start at \[0, 0\]"):
        merge_embedding([part, part], torch.tensor([0]), [0, 0])
    with pytest.raises(OperandError, match="token id -1 is below 0"):
        merge_embedding([part], torch.tensor([-1]), [0])


@pytest.mark.parametrize("elements", [64, 1024])
def test_no_row_depends_on_the_tile_it_shares(monkeypatch: pytest.MonkeyPatch, elements: int) -> None:
    x, residual, weight = draw(1, 45, 3, 20), draw(2, 45, 3, 20), draw(3, 3, 20)
    contract, swiglu_contract = RmsNormContract(output="bfloat16"), SwigluContract()
    rows = rope_table(frequencies(20, 1e4), 45, RopeContract()).at(torch.arange(45))

    def everything() -> list[torch.Tensor]:
        return [
            norm_triton.rms_norm(x, weight, contract),
            *norm_triton.add_rms_norm(x, residual, weight, contract),
            norm_triton.rms_norm_backward(residual, x, weight, contract)[0],
            rope_triton.rope(x, rows, RopeContract()),
            swiglu_triton.swiglu(x, residual, swiglu_contract),
            *swiglu_triton.swiglu_backward(x, x, residual, swiglu_contract),
            embedding_triton.embedding(torch.arange(45) % 7, x[:7, 0]),
        ]

    large = everything()
    in_small_tiles(monkeypatch, elements)
    assert all(same_bits(small, big) for small, big in zip(everything(), large, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(37, 1), (5, 3, 33), (2, 700), (1, 1)])
def test_norms_and_gates_stay_within_rounding_of_torch(shape: tuple[int, ...], dtype: DType) -> None:
    x, residual, weight = (draw(seed, *shape, dtype=dtype) for seed in (1, 2, 3))
    weight = weight[0]
    ulp = {"float32": 1e-6, "bfloat16": 2**-7, "float16": 2**-10}[dtype]
    for order, what in (("hf", "rounded"), ("kernel", "unrounded")):
        contract = RmsNormContract(rounding_order=order, output=dtype, normalises=what)  # type: ignore[arg-type]
        expected, total = norm_torch.add_rms_norm(x, residual, weight, contract)
        got, got_total = norm_triton.add_rms_norm(x, residual, weight, contract)
        assert same_bits(got_total, total)
        torch.testing.assert_close(got, expected, atol=ulp, rtol=ulp)
        y = norm_torch.rms_norm(x, weight, contract)
        torch.testing.assert_close(norm_triton.rms_norm(x, weight, contract), y, atol=ulp, rtol=ulp)
    for activation in ("quotient", "sigmoid"):
        gate = SwigluContract(output=dtype, activation=activation)  # type: ignore[arg-type]
        both = swiglu_torch.swiglu(x, residual, gate)
        torch.testing.assert_close(swiglu_triton.swiglu(x, residual, gate), both, atol=ulp, rtol=ulp)


def test_non_finite_rows_keep_their_class_and_their_neighbours() -> None:
    x = draw(1, 6, 40)
    clean = norm_triton.rms_norm(x, torch.ones(40), RmsNormContract())
    x[1, 3], x[3, 0], x[4] = NAN, INF, 0.0
    for module in (norm_torch, norm_triton):
        got = module.rms_norm(x, torch.ones(40), RmsNormContract())
        assert bool(got[1].isnan().all())
        assert bool(got[3, 0].isnan())
        assert bool((got[3, 1:] == 0).all())
        assert bool((got[4] == 0).all())
    assert same_bits(got[[0, 2, 5]], clean[[0, 2, 5]])
    gate = torch.tensor([NAN, INF, -1e4, 1e4, -0.0, 100.0])
    expected = swiglu_torch.swiglu(gate, torch.ones(6), SwigluContract())
    assert torch.equal(swiglu_triton.swiglu(gate, torch.ones(6), SwigluContract())[1:], expected[1:])


@pytest.mark.parametrize("module", [norm_torch, norm_triton], ids=["torch", "triton"])
def test_no_rows_are_no_work(module: ModuleType) -> None:
    assert module.rms_norm(torch.zeros(0, 8), torch.ones(8), RmsNormContract()).shape == (0, 8)
    grad_x, grad_weight = module.rms_norm_backward(
        torch.zeros(0, 8), torch.zeros(0, 8), torch.ones(8), RmsNormContract()
    )
    assert grad_x.shape == (0, 8)
    assert same_bits(grad_weight, torch.zeros(8))
    assert swiglu_triton.swiglu(torch.zeros(0, 4), torch.zeros(0, 4), SwigluContract()).shape == (0, 4)
    assert embedding_triton.embedding(torch.zeros(0, dtype=torch.int64), torch.zeros(3, 4)).shape == (0, 4)
    assert masked_triton.masked_sum(torch.zeros(0), torch.zeros(0)).active == 0
    rows = rope_table(frequencies(4, 1e4), 4, RopeContract()).at(torch.zeros(0, dtype=torch.int64))
    assert rope_triton.rope(torch.zeros(0, 2, 4), rows, RopeContract()).shape == (0, 2, 4)


@pytest.mark.parametrize("module", [norm_torch, norm_triton], ids=["torch", "triton"])
def test_wrong_operands_are_refused_in_one_sentence(module: ModuleType) -> None:
    contract = RmsNormContract()
    with pytest.raises(OperandError, match="x ends in 8, weight in 4"):
        module.rms_norm(torch.zeros(2, 8), torch.ones(4), contract)
    with pytest.raises(OperandError, match=r"weight is \(3, 8\) per head, x is \(2, 8\)"):
        module.rms_norm(torch.zeros(2, 8), torch.ones(3, 8), contract)
    with pytest.raises(OperandError, match=r"residual is \(1, 8\)"):
        module.add_rms_norm(torch.zeros(2, 8), torch.zeros(1, 8), torch.ones(8), contract)
    with pytest.raises(OperandError, match="at least one element"):
        module.rms_norm(torch.zeros(2, 0), torch.ones(0), contract)
    with pytest.raises(OperandError, match="use backend torch above 32768"):
        norm_triton.rms_norm(torch.zeros(1, 32769), torch.ones(32769), contract)


@pytest.mark.parametrize("width", [1, 77, 129, 1536])
def test_adding_element_by_element_gives_the_bits_of_the_product_with_ones(width: int) -> None:
    """So a GPU, where no product is probed, sums squares in the CPU's order to the CPU's bits."""
    x = draw(width, 40, width)
    for schedule in (Schedule(), *placebo_schedules(10)):
        assert same_bits(norm_torch.elementwise_row_sum(x, schedule), row_sum(x, schedule))


def test_the_sum_that_is_normalised_is_declared() -> None:
    """vLLM's plain-torch form normalises the float32 sum, its CUDA kernel and Hugging Face the rounded one."""
    x, residual, weight = (draw(seed, 64, 96, dtype="bfloat16") for seed in (1, 2, 3))
    wide = x.float() + residual.float()
    results = {}
    for what, source in (("rounded", wide.bfloat16()), ("unrounded", wide)):
        contract = RmsNormContract(output="bfloat16", normalises=what)  # type: ignore[arg-type]
        got, total = norm_torch.add_rms_norm(x, residual, weight[0], contract)
        assert same_bits(total, wide.bfloat16())
        assert same_bits(got, norm_torch.rms_norm(source, weight[0], contract))
        results[what] = got
    assert not same_bits(results["rounded"], results["unrounded"])
    assert (
        norm_torch.add_rms_norm(x, residual, weight[0], RmsNormContract(output="bfloat16", residual="float32"))[1].dtype
        == torch.float32
    )
