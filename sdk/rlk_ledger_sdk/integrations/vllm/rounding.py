"""How a live RMSNorm rounds, found by running it: a fixed input on which the possible orders differ."""

import sys
from typing import Any

ROWS = 32


def norm_contract(norm: Any, dtype: Any, probe: bool) -> dict[str, Any]:
    """The norm contract of a live RMSNorm layer in `dtype`.

    `rounding_order` is `hf` (rounds, then multiplies by the weight) or `kernel` (multiplies in float32, then rounds);
    it is declared only when the layer's output equals that order bit for bit and the other not, and so is
    `accumulate_dtype`. `residual_fusion` says whether the residual sum is rounded before it is normalised. `probe`
    False (the model is compiled, so that other kernels may run) declares `eps` alone.
    """
    body: dict[str, Any] = {"eps": float(norm.variance_epsilon)}
    torch = sys.modules["torch"]
    if not probe or dtype not in (torch.bfloat16, torch.float16):
        return body
    with torch.inference_mode():
        x = _values(norm, dtype, 0.7310)
        order = _which(norm(x.clone()), _orders(x.float(), norm, dtype))
        if order is not None:
            body.update(rounding_order=order, accumulate_dtype="float32")
            body["residual_fusion"] = _residual(norm, x, dtype, order)
    return {name: value for name, value in body.items() if value is not None}


def _residual(norm: Any, x: Any, dtype: Any, order: str) -> str | None:
    residual = _values(norm, dtype, 1.3170)
    try:
        got = norm(x.clone(), residual.clone())[0]
    except Exception:  # a layer without a fused form
        return None
    exact = _orders(x.float() + residual.float(), norm, dtype)[order]
    rounded = _orders((x + residual).float(), norm, dtype)[order]
    return _which(got, {"sum_in_float32": exact, "sum_rounded": rounded})


def _orders(wide: Any, norm: Any, dtype: Any) -> dict[str, Any]:
    torch = sys.modules["torch"]
    weight = norm.weight.data
    normed = wide * torch.rsqrt(wide.pow(2).mean(dim=-1, keepdim=True) + norm.variance_epsilon)
    return {"hf": normed.to(dtype) * weight, "kernel": (normed * weight.float()).to(dtype)}


def _which(got: Any, candidates: dict[str, Any]) -> str | None:
    torch = sys.modules["torch"]
    equal = [name for name, value in candidates.items() if torch.equal(got, value)]
    return equal[0] if len(equal) == 1 else None


def _values(norm: Any, dtype: Any, rate: float) -> Any:
    torch = sys.modules["torch"]
    width = norm.weight.numel()
    counts = torch.arange(ROWS * width, device=norm.weight.device, dtype=torch.float32)
    return (torch.sin(counts * rate) * 3).reshape(ROWS, width).to(dtype)
