"""Claim: the decoder runs exactly what the registry decided and says so; another backend is within tolerance and keeps
its own bits; one that promises none is refused; on a device nothing is left behind on the CPU."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from pretend_device import PretendDevice
from transformers import Qwen3Config, Qwen3ForCausalLM

from rlk_ledger_kernels.bits import same_bits
from rlk_ledger_kernels.errors import ContractError, DecisionError
from rlk_ledger_kernels.schedule import Schedule
from rlk_ledger_replay.decoder import Decoder
from rlk_ledger_replay.layout import Layout
from rlk_ledger_replay.numerics import Numerics

SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
}
SCHEDULE = Schedule(k_leaf=16, kv_block=16, vocab_tile=32)
IDS = torch.randint(0, 96, (41,), generator=torch.Generator().manual_seed(4)).tolist()


@cache
def model() -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    made = Qwen3ForCausalLM(Qwen3Config(**SIZES))
    return made.config.to_dict() | {"architectures": ["Qwen3ForCausalLM"]}, made.state_dict()


def decoder(compute: Any = "float32", **chosen: Any) -> Decoder:
    return Decoder.from_tensors(*model(), Numerics(compute=compute, schedule=SCHEDULE), **chosen)


@pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning")  # numpy's, on rows that are padding
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
def test_triton_agrees_with_torch_and_keeps_its_own_bits(compute: str) -> None:
    ours, ids = decoder(compute, backend="triton"), IDS[:21]
    assert {one.actual for one in ours.decisions} == {"triton"}
    scores, other = ours.prefill_logprobs(ids, 17), decoder(compute, backend="torch").prefill_logprobs(ids, 17)
    torch.testing.assert_close(scores, other, atol=1e-5 if compute == "float32" else 6e-2, rtol=0)
    assert same_bits(ours.decode_logprobs(ids, 17), scores)
    assert same_bits(decoder(compute, backend="triton", layout=Layout(tp=2)).prefill_logprobs(ids, 17), scores)


def test_decisions_are_those_of_the_registry_and_say_why() -> None:
    automatic, named = decoder(), decoder(backend="torch")
    for one in (*automatic.decisions, *named.decisions):
        assert one.actual == "torch"
        assert one.implementation == f"rlk_ledger_kernels.ops.{one.operator}.torch"
        assert one.consistency == "strict"
    assert {one.requested for one in automatic.decisions} == {"auto"}
    assert {one.requested for one in named.decisions} == {"torch"}
    told = [one.to_event("reference") for one in automatic.operators.provenance]
    assert [one.operator for one in told] == [one.operator for one in automatic.decisions]
    assert "rlk_ledger_kernels.ops.linear.torch.linear" in (told[2].callables or {}).values()


def test_what_promises_no_bits_or_cannot_run_is_refused() -> None:
    with pytest.raises(ContractError, match=r"'reference' of embedding promises no bits, and a decoder claims them"):
        decoder(backend="reference")
    with pytest.raises(ContractError, match=r"backend 'cublas' of a decoder does not exist; choose auto, .*torch"):
        decoder(backend="cublas")
    if not torch.cuda.is_available():
        with pytest.raises(DecisionError, match="torch sees no cuda device"):
            decoder(backend="torch", device="cuda")


@pytest.mark.parametrize("layout", [Layout(), Layout(tp=2, sp=True), Layout(cp=2)], ids=["one", "tp-sp", "cp"])
def test_on_a_device_nothing_is_left_on_the_cpu(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = decoder("bfloat16").prefill_logprobs(IDS, 17)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "pretended")
    with PretendDevice() as device:
        there = decoder("bfloat16", backend="torch", device="cuda", layout=layout)
        assert "not probed: torch on cuda" in there.admission().reason
        scores, decoded = device.back((there.prefill_logprobs(IDS, 17), there.decode_logprobs(IDS, 17)))
    torch.testing.assert_close(scores, wanted, atol=6e-2, rtol=0)
    assert same_bits(scores, decoded)
