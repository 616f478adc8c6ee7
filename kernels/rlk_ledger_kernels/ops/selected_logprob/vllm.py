"""selected_logprob, vLLM's batch-invariant log-softmax and a gather: log softmax(z / temperature)[token].

Opportunistic: the kernel sums a row in blocks of its own and writes all [rows, vocabulary] values, in float32 here,
since it would round them to the dtype of its operand. It is Triton, for CUDA.
"""

from __future__ import annotations

import torch

from rlk_ledger_kernels.dtypes import torch_dtype
from rlk_ledger_kernels.native_operands import function, library, on_cuda, refused
from rlk_ledger_kernels.ops.selected_logprob.contract import LogprobContract
from rlk_ledger_kernels.ops.selected_logprob.statistics import check_tokens

selected_logprob_backward = refused("vllm", "selected_logprob", "selected_logprob_backward")


def selected_logprob(
    logits_NV: torch.Tensor, tokens_N: torch.Tensor, contract: LogprobContract, vocabulary: int | None = None
) -> torch.Tensor:
    """Score tokens.

    logits_NV: [N, V] on CUDA. tokens_N: int64 [N]. vocabulary: columns beyond it are padding. Returns float32 [N]
    (nats). Raises OperandError for tokens outside the vocabulary, BackendError without vLLM or off CUDA.
    """
    size = logits_NV.shape[1] if vocabulary is None else vocabulary
    ignored_N = check_tokens(tokens_N, logits_NV.shape[0], size, contract)
    on_cuda("vllm", "selected_logprob", logits_NV)
    module = library("vllm", "vllm.model_executor.determinism.batch_invariant")
    log_softmax = function("vllm", module, "log_softmax")
    rounded_NV = logits_NV[:, :size].to(torch_dtype(contract.logits)).to(torch.float32)
    if not rounded_NV.shape[0]:
        return rounded_NV.new_empty((0,))
    scores_NV = torch.as_tensor(log_softmax(rounded_NV / contract.temperature, -1))
    picked_N = scores_NV.gather(1, tokens_N.to(torch.int64).clamp(0, size - 1)[:, None])[:, 0]
    return torch.where(ignored_N, 0.0, picked_N)
