"""Boundary capture, determinism readback and selected log-probabilities of the torch integration."""

import struct
from typing import Any

import pytest

from rlk_ledger_schemas.fingerprints import sum64x2, sum64x2_digest
from rlk_ledger_sdk.integrations.torch import capture_boundaries, record_determinism, selected_logprobs
from rlk_ledger_sdk.testing import capture

torch = pytest.importorskip("torch")


class Block(torch.nn.Module):
    """A residual linear layer that answers with a tuple, as decoder layers do."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = torch.nn.Linear(4, 4)

    def forward(self, x: Any) -> Any:
        return (x + self.mix(x), None)


class Model(torch.nn.Module):
    """Three blocks and a norm, wrapped once more, as engines wrap models."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(Block() for _ in range(3))
        self.norm = torch.nn.LayerNorm(4)

    def forward(self, x: Any) -> Any:
        for layer in self.layers:
            x, _ = layer(x)
        return self.norm(x)


@pytest.fixture
def model() -> Any:
    torch.manual_seed(0)
    return torch.nn.Sequential(Model())


def test_boundaries_come_in_order_with_the_digest_of_what_was_handed_on(model: Any) -> None:
    x = torch.randn(2, 4)
    with capture() as events, capture_boundaries(model, pass_id="logprob", tensors=True, layout_id="l0"):
        model(x)
        model(x)
    fields = [e.fields for e in events.of("boundary.captured")]
    names = ["0.layers.0", "0.layers.1", "0.layers.2", "0.norm"]
    assert [f["boundary"] for f in fields] == names * 2
    assert [f["order"] for f in fields] == [0, 1, 2, 3] * 2
    assert [f["pass_id"] for f in fields] == ["logprob/0"] * 4 + ["logprob/1"] * 4
    assert {f["layout_id"] for f in fields} == {"l0"}
    assert [f.get("layer") for f in fields[:3]] == [0, 1, 2]
    last = events.of("boundary.captured")[3]
    want = model(x).detach()
    assert last.arrays["values"] == want.reshape(-1).tolist()
    bits = struct.unpack("<8I", struct.pack("<8f", *want.reshape(-1).tolist()))
    assert last.fields["digest"] == sum64x2_digest([sum64x2("0.norm", bits)])
    assert (last.fields["dtype"], last.fields["shape"]) == ("float32", [2, 4])


def test_a_changed_bit_changes_the_digest_of_its_boundary_and_of_none_before_it(model: Any) -> None:
    x = torch.randn(2, 4)
    with capture() as events, capture_boundaries(model):
        model(x)
        with torch.no_grad():
            model[0].layers[1].mix.bias[0] += 1e-3
        model(x)
    digests = [e.fields["digest"] for e in events.of("boundary.captured")]
    assert [a == b for a, b in zip(digests[:4], digests[4:])] == [True, False, False, False]


def test_capture_changes_no_bit_of_the_outputs_or_gradients_and_leaves_no_hook(model: Any) -> None:
    x = torch.randn(3, 4)

    def run() -> tuple[Any, list[Any]]:
        model.zero_grad()
        out = model(x)
        out.sum().backward()
        return out.detach().clone(), [p.grad.clone() for p in model.parameters()]

    plain = run()
    with capture():
        hooks = capture_boundaries(model, ["*layers.*", "*mix"], tensors=True)
        assert len(hooks) == 6
        watched = run()
        hooks.remove()
    assert torch.equal(plain[0], watched[0])
    assert all(torch.equal(a, b) for a, b in zip(plain[1], watched[1]))
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_with_recording_off_nothing_is_hooked(model: Any) -> None:
    assert len(capture_boundaries(model)) == 0
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_bf16_boundaries_are_digested_in_bf16_and_kept_exactly() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4)).to(torch.bfloat16)
    x = torch.randn(2, 4).to(torch.bfloat16)
    with capture() as events, capture_boundaries(model, ["0"], tensors=True):
        out = model(x)
    event = events.of("boundary.captured")[0]
    assert event.fields["dtype"] == "bfloat16"
    assert torch.equal(torch.tensor(event.arrays["values"]).to(torch.bfloat16), out.reshape(-1))
    bits = [b & 0xFFFF for b in out.detach().view(torch.int16).reshape(-1).tolist()]
    assert event.fields["digest"] == sum64x2_digest([sum64x2("0", bits)])


def test_determinism_is_what_torch_says_not_what_was_asked() -> None:
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(False)
    try:
        with capture() as events:
            record_determinism({"torch.deterministic_algorithms": True})
    finally:
        torch.use_deterministic_algorithms(before)
    knobs = {e.fields["path"]: e.fields for e in events.of("knob.applied")}
    asked = knobs["torch.deterministic_algorithms"]
    assert (asked["requested"], asked["actual"], asked["status"]) == (True, False, "fallback")
    assert knobs["torch.num_threads"]["actual"] == torch.get_num_threads()
    assert knobs["torch.num_threads"]["status"] == "applied"


def test_autocast_in_force_is_read_back() -> None:
    with capture() as events, torch.autocast("cpu", dtype=torch.bfloat16):
        record_determinism()
    knobs = {e.fields["path"]: e.fields.get("actual") for e in events.of("knob.applied")}
    assert knobs["torch.autocast"] == {"cpu": "bfloat16"}


def test_the_cublas_variable_is_unobservable_not_applied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    with capture() as events:
        record_determinism()
    knob = next(e.fields for e in events.of("knob.applied") if e.fields["path"].startswith("cublas."))
    assert (knob["materialized"], knob.get("actual"), knob["status"]) == (":4096:8", None, "unobservable")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_selected_logprobs_agree_with_float64_whatever_the_chunk(dtype: str, temperature: float) -> None:
    torch.manual_seed(1)
    logits = (torch.randn(3, 7, 501) * 8).to(getattr(torch, dtype))
    ids = torch.randint(0, 501, (3, 7))
    exact = torch.log_softmax(logits.double() / temperature, -1).gather(-1, ids[..., None])[..., 0]
    whole = selected_logprobs(logits, ids, temperature)
    assert whole.dtype == torch.float32
    assert (whole.double() - exact).abs().max() < 1e-5
    assert torch.equal(whole, selected_logprobs(logits, ids, temperature, chunk=4))
