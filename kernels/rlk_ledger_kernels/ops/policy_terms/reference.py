"""policy_terms, float32 reference: the definitions, one after the other (k3: Schulman 2020; surrogate: PPO, 2017)."""

from __future__ import annotations

import torch

from rlk_ledger_kernels.ops.policy_terms.contract import PolicyTerms, PolicyTermsContract, check_operands


def policy_terms(
    training_N: torch.Tensor, rollout_N: torch.Tensor, advantage_N: torch.Tensor, contract: PolicyTermsContract
) -> PolicyTerms:
    """Terms of each token in float32.

    training_N, rollout_N: log-probabilities [N] in nats. advantage_N: [N]. Returns float32 [N] each.
    """
    check_operands(training_N, rollout_N, advantage_N)
    d_N = training_N.to(torch.float32) - rollout_N.to(torch.float32)
    c_N = d_N.clamp(-contract.clamp, contract.clamp)
    ratio_N, advantage_N = c_N.exp(), advantage_N.to(torch.float32)
    low, high = 1 - contract.eps_low, 1 + contract.eps_high
    surrogate_N = torch.minimum(ratio_N * advantage_N, ratio_N.clamp(low, high) * advantage_N)
    outside_N = (ratio_N < low) | (ratio_N > high)
    k3_N = c_N.expm1() - c_N
    return PolicyTerms(ratio_N, -d_N, d_N.square() / 2, k3_N, surrogate_N, d_N.abs() > contract.clamp, outside_N)
