"""Claim: a patched Hugging Face model gives a token the same bits in every batch, the gradients of float64, and back.

Models are tiny, random and of every known architecture; the unpatched model in float64 is the judge.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from rlk_ledger_kernels.bits import same_bits
from rlk_ledger_kernels.errors import ContractError, OperandError
from rlk_ledger_kernels.providers.hugging_face import ARCHITECTURES, patch, selected_logprobs, unpatch

transformers = pytest.importorskip("transformers")
VOCABULARY, LENGTHS = 67, (9, 1, 14, 5)


def tiny(name: str = "Qwen3ForCausalLM", dtype: torch.dtype = torch.float32, **more: Any) -> Any:
    torch.manual_seed(0)
    model_class = getattr(transformers, name)
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
    }
    if name == "MistralForCausalLM":
        sizes["sliding_window"] = 4
    model = model_class(model_class.config_class(**(sizes | more)))
    with torch.no_grad():  # norms and biases that start as ones and zeros would hide mistakes
        for parameter in model.parameters():
            parameter += torch.randn_like(parameter) * 0.05
    return model.to(dtype).eval()


def sequences() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, VOCABULARY, (length,), generator=generator) for length in LENGTHS]


def padded(rows: list[torch.Tensor], width: int, side: str) -> tuple[torch.Tensor, torch.Tensor]:
    ids, mask = torch.full((len(rows), width), 3), torch.zeros((len(rows), width), dtype=torch.int64)
    for index, row in enumerate(rows):
        place = slice(0, len(row)) if side == "right" else slice(width - len(row), width)
        ids[index, place], mask[index, place] = row, 1
    return ids, mask


def alone(model: Any, rows: list[torch.Tensor]) -> list[torch.Tensor]:
    return [selected_logprobs(model, row[None], temperature=0.7)[0].detach() for row in rows]


def in_float64(model: Any, rows: list[torch.Tensor]) -> list[torch.Tensor]:
    """log softmax of the unpatched model in float64, one sequence at a time."""
    made = []
    for row in rows:
        scores = torch.log_softmax(model(input_ids=row[None]).logits[0, :-1] / 0.7, -1)
        made.append(torch.cat((scores.new_zeros(1), scores.gather(1, row[1:, None])[:, 0])))
    return made


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def model(request: pytest.FixtureRequest) -> Iterator[Any]:
    held = tiny(dtype=request.param)
    with patch(held, backend="torch"):
        yield held


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_values_and_gradients_are_those_of_float64(name: str) -> None:
    held = tiny(name)
    wide = copy.deepcopy(held).double()
    rows = sequences()
    ids, mask = padded(rows, 16, "left")
    with patch(held, backend="torch"):
        logprobs = selected_logprobs(held, ids, mask, temperature=0.7)
        logprobs.square().sum().backward()
    expected = in_float64(wide, rows)
    torch.stack([one.square().sum() for one in expected]).sum().backward()
    for got, row in zip(logprobs, expected, strict=True):
        torch.testing.assert_close(got[16 - len(row) :].double(), row, atol=1e-5, rtol=0)
        assert not got[: 16 - len(row)].any()
    for (path, ours), theirs in zip(held.named_parameters(), wide.parameters(), strict=True):
        size = theirs.grad.abs().max()
        torch.testing.assert_close(ours.grad.double(), theirs.grad, atol=1e-5 * size, rtol=1e-4, msg=path)


@pytest.mark.parametrize("side", ["left", "right"])
def test_batch_and_padding_change_no_bit(model: Any, side: str) -> None:
    rows = sequences()
    expected = alone(model, rows)
    for width in (14, 23):
        got = selected_logprobs(model, *padded(rows, width, side), temperature=0.7)
        for index, row in enumerate(expected):
            place = slice(0, len(row)) if side == "right" else slice(width - len(row), width)
            assert same_bits(got[index, place], row)


def test_the_logits_keep_their_bits_too(model: Any) -> None:
    rows = sequences()
    ids, mask = padded(rows, 20, "left")
    together = model(input_ids=ids, attention_mask=mask).logits
    for index, row in enumerate(rows):
        assert same_bits(together[index, 20 - len(row) :], model(input_ids=row[None]).logits[0])


def test_packing_changes_no_bit(model: Any) -> None:
    rows = sequences()
    positions = torch.cat([torch.arange(len(row)) for row in rows])[None]
    got = selected_logprobs(model, torch.cat(rows)[None], position_ids=positions, temperature=0.7)[0]
    start = 0
    for row, expected in zip(rows, alone(model, rows), strict=True):
        assert same_bits(got[start + 1 : start + len(row)], expected[1:])
        start += len(row)


def test_the_unpatched_model_changes_bits_with_the_batch() -> None:
    """Without the patch the tests above fail."""
    held, rows = tiny(), sequences()
    ids, mask = padded(rows, 23, "left")
    together = held(input_ids=ids, attention_mask=mask).logits
    assert any(
        not same_bits(together[index, 23 - len(row) :], held(input_ids=row[None]).logits[0])
        for index, row in enumerate(rows)
    )


def test_a_step_taken_twice_gives_the_same_weights() -> None:
    weights = []
    for _ in range(2):
        held = tiny().train()
        optimizer = torch.optim.SGD(held.parameters(), lr=0.1)
        with patch(held, backend="torch"):
            for _ in range(2):
                optimizer.zero_grad()
                (-selected_logprobs(held, *padded(sequences(), 15, "right"))).sum().backward()
                optimizer.step()
        weights.append(list(held.parameters()))
    assert all(same_bits(a.detach(), b.detach()) for a, b in zip(*weights, strict=True))


def test_unpatching_restores_the_model_bit_for_bit() -> None:
    held = tiny()
    ids, mask = padded(sequences(), 15, "left")
    before = held(input_ids=ids, attention_mask=mask).logits
    state = {name: tensor.clone() for name, tensor in held.state_dict().items()}
    attributes = {name: set(module.__dict__) for name, module in held.named_modules()}
    patch(held, backend="torch")
    assert held.state_dict().keys() == state.keys()
    selected_logprobs(held, ids, mask)
    unpatch(held)
    assert same_bits(held(input_ids=ids, attention_mask=mask).logits, before)
    assert all(same_bits(tensor, state[name]) for name, tensor in held.state_dict().items())
    assert {name: set(module.__dict__) for name, module in held.named_modules()} == attributes
    with pytest.raises(ContractError, match="is not patched"):
        unpatch(held)


def test_decisions_name_what_ran() -> None:
    with patch(tiny(), backend="torch") as held:
        assert {one.actual for one in held.decisions.values()} == {"torch"}
        assert not any(one.fallback for one in held.decisions.values())


def with_adapter() -> Any:
    held = tiny()
    held.model.layers[0].mlp.up_proj = torch.nn.Bilinear(2, 2, 2)
    return held


def with_own_forward() -> Any:
    held = tiny()
    held.model.norm.forward = held.model.norm.forward
    return held


def mixed_dtypes() -> Any:
    held = tiny()
    held.lm_head.to(torch.bfloat16)
    return held


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: torch.nn.Linear(2, 2), "Linear is not known; known are LlamaForCausalLM"),
        (with_adapter, "up_proj is a Bilinear, which has no operator here"),
        (with_own_forward, "model.norm has a forward of its own"),
        (mixed_dtypes, r"parameters are torch.bfloat16, torch.float32"),
        (lambda: tiny(attention_dropout=0.1), "attention_dropout is not 0"),
        (lambda: tiny(hidden_act="gelu"), "hidden_act is 'gelu'"),
    ],
    ids=["architecture", "layer", "other-patch", "dtypes", "dropout", "activation"],
)
def test_what_is_not_known_is_refused_by_name_and_left_as_it_was(make: Any, told: str) -> None:
    held = make()
    attributes = {name: set(module.__dict__) for name, module in held.named_modules()}
    with pytest.raises(ContractError, match=told):
        patch(held, backend="torch")
    assert {name: set(module.__dict__) for name, module in held.named_modules()} == attributes


def test_a_second_patch_a_filled_cache_and_autocast_are_refused() -> None:
    held = tiny()
    with patch(held, backend="torch"):
        with pytest.raises(ContractError, match="patched already"):
            patch(held, backend="torch")
        ids = sequences()[0][None]
        keyword = "cache" if "cache" in inspect.signature(held.model.forward).parameters else "past_key_values"
        cache = getattr(held(input_ids=ids, use_cache=True), keyword)
        with pytest.raises(OperandError, match="without a filled cache"):
            held(input_ids=ids[:, :1], **{keyword: cache})
        with torch.autocast("cpu", torch.bfloat16), pytest.raises(ContractError, match="autocast"):
            held(input_ids=ids)
