"""Stand-ins for libraries that need a GPU, with the calls their documentation describes and plain torch inside.

They prove that a backend hands over operands, pages and scales as documented; of the real kernels they prove nothing.
flashinfer 0.6: https://docs.flashinfer.ai/api/; transformer_engine 2: its `pytorch` user guide; vLLM: its
`model_executor/determinism/batch_invariant.py`. Every call checks what the real one demands.
"""

# ruff: noqa: PT018 -- the assertions are what the libraries demand of their callers
from __future__ import annotations

import math
from types import ModuleType
from typing import Any

import torch


def modules() -> dict[str, ModuleType]:
    """Every stand-in by the name it is imported under."""
    made = {
        "flashinfer": {"BatchPrefillWithPagedKVCacheWrapper": PagedPrefill},
        "flashinfer.norm": {"rmsnorm": rmsnorm, "fused_add_rmsnorm": fused_add_rmsnorm},
        "flashinfer.activation": {"silu_and_mul": silu_and_mul},
        "flashinfer.rope": {"apply_rope_with_cos_sin_cache_inplace": apply_rope},
        "transformer_engine": {},
        "transformer_engine.pytorch": {"RMSNorm": RMSNorm, "Linear": Linear},
        "vllm": {},
        "vllm.model_executor": {},
        "vllm.model_executor.determinism": {},
        "vllm.model_executor.determinism.batch_invariant": {
            "linear_batch_invariant": linear_batch_invariant,
            "log_softmax": log_softmax,
        },
    }
    found = {}
    for name, content in made.items():
        found[name] = ModuleType(name)
        vars(found[name]).update(content)
    return found


def _checked(*operands: torch.Tensor) -> None:
    assert all(one.is_cuda for one in operands)
    assert len({one.dtype for one in operands}) == 1
    assert operands[0].dtype in (torch.bfloat16, torch.float16), "flashinfer takes 16-bit operands"


def _normal(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.to(torch.float32)
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.to(torch.float32)).to(x.dtype)


def rmsnorm(
    input: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6, out: Any = None, enable_pdl: bool | None = None
) -> torch.Tensor:
    """flashinfer.norm.rmsnorm: 2-D rows, contiguous."""
    _checked(input, weight)
    assert input.dim() == 2 and weight.shape == (input.shape[1],)
    result: torch.Tensor = torch.empty_like(input) if out is None else out
    return result.copy_(_normal(input, weight, eps))


def fused_add_rmsnorm(
    input: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6, enable_pdl: Any = None
) -> None:
    """flashinfer.norm.fused_add_rmsnorm: the residual becomes the sum, the input the norm of it."""
    _checked(input, residual, weight)
    residual.add_(input)
    input.copy_(_normal(residual, weight, eps))


def silu_and_mul(input: torch.Tensor, out: Any = None, enable_pdl: bool | None = None) -> torch.Tensor:
    """flashinfer.activation.silu_and_mul: gate in the first half of the last dimension."""
    _checked(input)
    assert input.shape[-1] * input.element_size() % 16 == 0
    gate, up = input.to(torch.float32).chunk(2, -1)
    result: torch.Tensor = torch.empty_like(gate).to(input.dtype) if out is None else out
    return result.copy_((gate * torch.sigmoid(gate) * up).to(input.dtype))


def apply_rope(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    head_size: int,
    cos_sin_cache: torch.Tensor,
    is_neox: bool = True,
) -> None:
    """flashinfer.rope.apply_rope_with_cos_sin_cache_inplace: flat heads, a float32 table of cosines and then sines."""
    _checked(query, key)
    assert cos_sin_cache.dtype == torch.float32
    rows = cos_sin_cache.index_select(0, positions)
    half = rows.shape[1] // 2
    cos_N1F, sin_N1F = rows[:, None, :half], rows[:, None, half:]
    for flat in (query, key):
        heads = flat.view(len(flat), -1, head_size)
        part = heads[..., : 2 * half].to(torch.float32)
        low, high = part.chunk(2, -1) if is_neox else (part[..., 0::2], part[..., 1::2])
        turned = (low * cos_N1F - high * sin_N1F, high * cos_N1F + low * sin_N1F)
        joined = torch.cat(turned, -1) if is_neox else torch.stack(turned, -1).flatten(-2)
        heads[..., : 2 * half] = joined.to(flat.dtype)


class PagedPrefill:
    """flashinfer.BatchPrefillWithPagedKVCacheWrapper: plan once, run; the log-sum-exp is in powers of two."""

    def __init__(self, float_workspace_buffer: torch.Tensor, kv_layout: str = "NHD", *, backend: str = "auto") -> None:
        assert float_workspace_buffer.dtype == torch.uint8
        assert (kv_layout, backend) == ("HND", "fa2")

    def plan(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        *,
        causal: bool,
        sm_scale: float,
        window_left: int,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
        disable_split_kv: bool,
    ) -> None:
        """Keep the layout; int32 index tensors are what the real one takes."""
        tables = (qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
        assert all(table.dtype == torch.int32 for table in tables)
        assert causal and disable_split_kv and num_qo_heads % num_kv_heads == 0
        assert q_data_type == kv_data_type
        self.q, self.kv, self.pages, self.last = (table.tolist() for table in tables)
        self.page_size, self.scale, self.left, self.head_dim = page_size, sm_scale, window_left, head_dim_qk
        self.group = num_qo_heads // num_kv_heads

    def run(
        self, q: torch.Tensor, paged_kv_cache: tuple[torch.Tensor, torch.Tensor], return_lse: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attend; the last query of a request sees its last key."""
        assert return_lse and len(q) == self.q[-1]
        outs, lses = [], []
        for one in range(len(self.last)):
            pages = self.pages[self.kv[one] : self.kv[one + 1]]
            seen = (len(pages) - 1) * self.page_size + self.last[one]
            k, v = (torch.cat([side[page] for page in pages], dim=1)[:, :seen] for side in paged_kv_cache)
            out, lse = self._attend(q[self.q[one] : self.q[one + 1]], k, v, seen)
            outs.append(out)
            lses.append(lse)
        return torch.cat(outs).to(q.dtype), torch.cat(lses)

    def _attend(
        self, q_THD: torch.Tensor, k_KSD: torch.Tensor, v_KSD: torch.Tensor, seen: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        k, v = (side.to(torch.float32).repeat_interleave(self.group, dim=0) for side in (k_KSD, v_KSD))
        scores_HTS = torch.einsum("thd,hsd->hts", q_THD.to(torch.float32), k) * self.scale
        at_T1 = torch.arange(seen - len(q_THD), seen, device=q_THD.device)[:, None]
        key_S = torch.arange(seen, device=q_THD.device)[None, :]
        hidden_TS = key_S > at_T1
        if self.left >= 0:
            hidden_TS = hidden_TS | (key_S < at_T1 - self.left)
        scores_HTS = scores_HTS.masked_fill(hidden_TS, float("-inf"))
        out_THD = torch.einsum("hts,hsd->thd", scores_HTS.softmax(-1), v)
        return out_THD, scores_HTS.logsumexp(-1).T.contiguous() / math.log(2.0)


class RMSNorm(torch.nn.Module):
    """transformer_engine.pytorch.RMSNorm."""

    def __init__(self, normalized_shape: int, eps: float, *, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(normalized_shape, device=device, dtype=dtype), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise rows."""
        assert x.is_cuda and x.is_contiguous() and x.dtype == self.weight.dtype
        return _normal(x, self.weight, self.eps)


class Linear(torch.nn.Module):
    """transformer_engine.pytorch.Linear."""

    def __init__(
        self, in_features: int, out_features: int, bias: bool, *, params_dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(
            torch.zeros((out_features, in_features), device=device, dtype=params_dtype), requires_grad=False
        )
        self.bias = torch.nn.Parameter(
            torch.zeros(out_features if bias else 0, device=device, dtype=params_dtype), requires_grad=False
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x W^T + b."""
        assert x.is_cuda and x.dtype == self.weight.dtype
        return linear_batch_invariant(x, self.weight, self.bias if len(self.bias) else None)


def linear_batch_invariant(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """vLLM's: x W^T + b in the dtype of its operands, with float32 sums."""
    assert input.is_cuda and input.dtype == weight.dtype and (bias is None or bias.dtype == weight.dtype)
    y = input.to(torch.float32) @ weight.to(torch.float32).T
    return (y if bias is None else y + bias.to(torch.float32)).to(input.dtype)


def log_softmax(input: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """vLLM's: over the last dimension, in the dtype of its operand."""
    assert input.is_cuda and dim == -1
    return torch.log_softmax(input, -1)
