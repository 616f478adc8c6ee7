"""Claim: the linear-logp provider gives float64's numbers and gradients, says what ran, and refuses by reason code."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlk_ledger_kernels.bits import same_bits
from rlk_ledger_kernels.providers.linear_logp import REASONS, LinearLogp, LinearLogpRefusedError, provider
from rlk_ledger_schemas.modes import Consistency, Fast

T, H, REAL, PADDED = 9, 16, 250, 256
MODES: list[tuple[Fast, Consistency]] = [("auto", "audit"), ("auto", "strict"), ("strict", "strict")]


def request(**changes: Any) -> SimpleNamespace:
    """What vime's boundary hands over, structurally; one rank, a padded vocabulary, one target left out."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn((T, H), generator=generator).requires_grad_()
    weight = torch.randn((PADDED, H), generator=generator).requires_grad_()
    targets = torch.randint(0, REAL, (T,), generator=generator)
    targets[2] = -100
    fields = {
        "logits": hidden @ weight.T,
        "target_ids": targets,
        "tensor_parallel_group": None,
        "token_layout": SimpleNamespace(world_size=1, rank=0, layout="single"),
        "with_entropy": False,
        "with_entropy_grad": False,
        "chunk_size": 1024,
        "log_prob_keep_mask": None,
        "context": SimpleNamespace(
            hidden=hidden,
            projection=SimpleNamespace(weight=weight, bias=None),
            vocab_partition=SimpleNamespace(local_start=0, local_size=PADDED, real_size=REAL, padded_size=PADDED),
        ),
        "temperature": 0.7,
        "metadata": {},
    }
    return SimpleNamespace(**(fields | changes))


def declared(**changes: Any) -> SimpleNamespace:
    """A request without structural context: the sizes stand in the metadata."""
    sizes = {"vocab_start": 0, "real_vocab_size": REAL, "padded_vocab_size": PADDED}
    return request(**({"context": None, "metadata": sizes} | changes))


@pytest.mark.parametrize(("fast", "consistency"), MODES)
@pytest.mark.parametrize("make", [request, declared], ids=["hidden", "logits"])
def test_values_and_gradients_are_those_of_float64(make: Any, fast: Fast, consistency: Consistency) -> None:
    given = make()
    result = LinearLogp(fast, consistency, "torch")(given)
    leaves = request().context
    wide = [one.detach().double().requires_grad_() for one in (leaves.hidden, leaves.projection.weight)]
    whole = wide[0] @ wide[1].T
    whole.retain_grad()
    logits = whole[:, :REAL]
    expected = torch.log_softmax(logits / 0.7, -1).gather(1, given.target_ids.clamp(0)[:, None])
    expected = torch.where(given.target_ids[:, None] == -100, 0.0, expected)
    torch.testing.assert_close(result.logp.double(), expected, atol=2e-5, rtol=0)
    assert same_bits(result.logp[2, 0].detach(), torch.tensor(0.0))
    expected.square().sum().backward()
    if make is request:
        result.logp.square().sum().backward()
        for ours, theirs in zip((given.context.hidden, given.context.projection.weight), wide, strict=True):
            torch.testing.assert_close(ours.grad.double(), theirs.grad, atol=1e-3, rtol=1e-4)
    else:
        (ours,) = torch.autograd.grad(result.logp.square().sum(), given.logits)
        torch.testing.assert_close(ours.double(), whole.grad, atol=1e-3, rtol=1e-4)
    assert result.logp.shape == (T, 1)
    assert result.logp.dtype == torch.float32
    assert result.provenance["source"] == ("hidden" if make is request else "logits")
    assert int(result.provenance["ignored"]) == 1
    assert result.provenance["decision"].actual == "torch"
    assert result.backend_id.endswith(".torch")
    assert result.contract_id.startswith("sha256:")
    assert result.contract_id == result.provenance["decision"].contract_id


def test_rows_that_come_in_other_calls_have_the_same_bits() -> None:
    whole = LinearLogp("auto", "strict", "torch")(declared()).logp.detach()
    for start, end in ((0, 1), (1, 6), (6, T)):
        given = declared()
        part = replace_rows(given, slice(start, end))
        assert same_bits(LinearLogp("auto", "strict", "torch")(part).logp.detach(), whole[start:end])


def replace_rows(given: SimpleNamespace, rows: slice) -> SimpleNamespace:
    return SimpleNamespace(**(vars(given) | {"logits": given.logits[rows], "target_ids": given.target_ids[rows]}))


def test_another_temperature_or_tile_is_another_contract() -> None:
    run = LinearLogp("auto", "strict", "torch")
    first = run(request()).contract_id
    assert first == run(request()).contract_id
    assert first != run(request(temperature=0.8)).contract_id
    assert first != run(request(metadata={"vocab_tile": 64})).contract_id


def test_logits_at_the_sampling_temperature_are_not_recomputed_from_hidden_states() -> None:
    """None says that the logits are what the softmax takes; hidden states know nothing of that."""
    result = LinearLogp("auto", "strict", "torch")(request(temperature=None))
    assert result.provenance["source"] == "logits"


def without(field: str) -> SimpleNamespace:
    place = SimpleNamespace(local_start=0, local_size=PADDED, real_size=REAL, padded_size=PADDED)
    setattr(place, field, None)
    given = request()
    given.context.vocab_partition = place
    return given


def detached(field: str) -> SimpleNamespace:
    given = request()
    if field == "hidden":
        given.context.hidden = given.context.hidden.detach()
    else:
        given.context.projection.weight = given.context.projection.weight.detach()
    return given


def logits_detached_from(field: str = "", **changes: Any) -> SimpleNamespace:
    """Logits that say nothing of training, beside a hidden state or a weight that does."""
    given = detached(field) if field else request(**changes)
    given.logits = given.logits.detach()
    return given


def shard(start: int, width: int) -> SimpleNamespace:
    given = request()
    given.logits = given.logits[:, start : start + width]
    given.context.projection.weight = given.context.projection.weight[start : start + width]
    given.context.vocab_partition = SimpleNamespace(
        local_start=start, local_size=width, real_size=REAL, padded_size=PADDED
    )
    return given


REFUSED = [
    ("vocabulary_undeclared", lambda: declared(metadata={})),
    ("vocabulary_undeclared", lambda: without("real_size")),
    ("vocabulary_undeclared", lambda: without("padded_size")),
    ("shard_unaligned", lambda: shard(0, 100)),
    ("shard_unaligned", lambda: shard(0, 128)),
    ("layout_undeclared", lambda: request(token_layout=None)),
    (
        "layout_undeclared",
        lambda: request(token_layout=SimpleNamespace(world_size=2, rank=0, layout="single")),
    ),
    ("mask_unsupported", lambda: request(log_prob_keep_mask=torch.ones((T, PADDED), dtype=torch.bool))),
    ("entropy_unsupported", lambda: request(with_entropy=True)),
    ("temperature_unsupported", lambda: request(temperature=torch.ones(T))),
    ("temperature_unsupported", lambda: request(temperature=0.0)),
    ("gradient_detached", lambda: detached("hidden")),
    ("gradient_detached", lambda: detached("weight")),
    ("gradient_detached", lambda: declared_trained_without_grad()),
    ("gradient_detached", lambda: logits_detached_from(temperature=None)),
    ("gradient_detached", lambda: logits_detached_from(field="hidden")),
    ("request_malformed", lambda: request(target_ids=torch.zeros(T + 1, dtype=torch.int64))),
    ("request_malformed", lambda: request(target_ids=torch.full((T,), PADDED))),
]


def declared_trained_without_grad() -> SimpleNamespace:
    given = declared()
    given.logits = given.logits.detach()
    given.metadata = given.metadata | {"requires_grad": True}
    return given


@pytest.mark.parametrize(("fast", "consistency"), MODES)
@pytest.mark.parametrize(("code", "make"), REFUSED, ids=[f"{i}-{code}" for i, (code, _) in enumerate(REFUSED)])
def test_what_is_missing_is_refused_by_code(code: str, make: Any, fast: Fast, consistency: Consistency) -> None:
    with pytest.raises(LinearLogpRefusedError, match=rf"\[{code}\]") as caught:
        LinearLogp(fast, consistency, "torch")(make())
    assert caught.value.code == code
    assert caught.value.linear_logp_provider_unavailable == (consistency != "strict")


def test_no_backend_stands_in_unasked() -> None:
    with pytest.raises(LinearLogpRefusedError) as caught:
        LinearLogp("strict", "strict", "reference")(request())
    assert caught.value.code == "backend_refused"
    assert "reference" in str(caught.value)


def test_fast_off_keeps_the_engines_operator_and_says_so_to_vime(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLK_FAST", "off")
    monkeypatch.setenv("RLK_CONSISTENCY", "audit")
    with pytest.raises(LinearLogpRefusedError) as caught:
        provider(request())
    assert caught.value.code == "mode_off"
    assert caught.value.linear_logp_provider_unavailable


def test_scoring_without_gradients_is_no_detachment() -> None:
    with torch.no_grad():
        assert not LinearLogp("auto", "strict", "torch")(detached("hidden")).logp.requires_grad


def test_every_reason_a_request_can_cause_is_tried() -> None:
    tried = {code for code, _ in REFUSED} | {"backend_refused", "mode_off"}
    assert REASONS.keys() - tried == {"fallback"}  # tried below, with a registry that falls back


def test_a_fallback_is_refused_under_strict(monkeypatch: pytest.MonkeyPatch) -> None:
    from rlk_ledger_kernels import registry

    decided = registry.resolve

    def falls_back(*args: Any, **kwargs: Any) -> registry.Decision:
        import msgspec

        return msgspec.structs.replace(decided(*args, **kwargs), fallback=True)

    monkeypatch.setattr(registry, "resolve", falls_back)
    with pytest.raises(LinearLogpRefusedError) as caught:
        LinearLogp("auto", "strict", "torch")(request())
    assert caught.value.code == "fallback"
    assert LinearLogp("auto", "audit", "torch")(request()).provenance["decision"].fallback
