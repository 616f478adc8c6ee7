"""The probe on a GPU that is not there, and products that stay float32 whatever a job has switched on."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from pretend_device import PretendDevice

from rlk_ledger_kernels import precision, probe
from rlk_ledger_kernels.bits import same_bits
from rlk_ledger_kernels.errors import InvarianceError
from rlk_ledger_kernels.ops.linear.contract import LinearContract
from rlk_ledger_kernels.ops.linear.torch import linear, pack_linear
from rlk_ledger_kernels.precision import cublas_workspace, exact_products
from rlk_ledger_kernels.probe import ShapesInUse, admit
from rlk_ledger_kernels.schedule import Schedule

SHAPES = ShapesInUse(products=frozenset({(128, 0, 128, 272)}), heads=(2, 32, 48))


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(probe, "_verdicts", {})
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Pretend H200")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    with PretendDevice():
        yield


@pytest.mark.usefixtures("pretended")
def test_a_gpu_is_probed_by_itself_and_its_verdict_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    seen: set[str] = set()
    real = probe.contract_rows

    def watched(x: torch.Tensor, leaves: object, tiles: tuple[int, ...]) -> torch.Tensor:
        seen.add(x.device.type)
        return real(x, leaves, tiles)  # type: ignore[arg-type]

    monkeypatch.setattr(probe, "contract_rows", watched)
    admission = admit(SHAPES, Schedule(), "cuda")
    assert seen == {"cuda"}
    assert admission.row_tiles == Schedule().row_tiles
    assert "CUBLAS_WORKSPACE_CONFIG is not set; set it to :4096:8" in admission.reason
    assert admit(SHAPES, Schedule(), "cuda") is admission
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Another card")
    assert admit(SHAPES, Schedule(), "cuda") is not admission


@pytest.mark.usefixtures("pretended")
def test_a_gpu_whose_bits_depend_on_the_row_count_gets_one_wide_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    real = probe.contract_rows

    def differs_by_tile(x: torch.Tensor, leaves: object, tiles: tuple[int, ...]) -> torch.Tensor:
        return real(x, leaves, tiles) + tiles[-1] * 1e-6  # type: ignore[arg-type]

    monkeypatch.setattr(probe, "contract_rows", differs_by_tile)
    admission = admit(SHAPES, Schedule(), "cuda")
    assert admission.row_tiles == (128,)
    assert "is not repeatable" in admission.reason

    monkeypatch.setattr(probe, "_verdicts", {})
    monkeypatch.setattr(probe, "contract_rows", lambda x, leaves, tiles: torch.rand_like(real(x, leaves, tiles)))
    with pytest.raises(InvarianceError, match="gives no repeatable bits here"):
        admit(SHAPES, Schedule(), "cuda")


def test_a_product_ignores_what_the_job_switched_on_and_puts_it_back() -> None:
    x, weight = (torch.randn((n, 256), generator=torch.Generator().manual_seed(n)) for n in (64, 48))
    packed = pack_linear(weight, LinearContract())
    plain = linear(x, packed)
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")  # bfloat16 products where the machine has them
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert same_bits(linear(x, packed), plain)
            assert torch.is_autocast_enabled("cpu")
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(before)


def test_switches_of_a_gpu_are_held_and_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    class Switches:
        fp32_precision = "tf32"
        allow_fp16_reduced_precision_reduction = True
        allow_bf16_reduced_precision_reduction = True

    switches = Switches()
    monkeypatch.setattr(precision, "_product_switches", lambda device: switches)

    def fail_inside_a_product() -> None:
        with exact_products(torch.device("cuda")):
            assert switches.fp32_precision == "ieee"
            assert not switches.allow_fp16_reduced_precision_reduction
            assert not switches.allow_bf16_reduced_precision_reduction
            raise KeyError("an error inside a product")

    with pytest.raises(KeyError):
        fail_inside_a_product()
    assert switches.fp32_precision == "tf32"
    assert switches.allow_fp16_reduced_precision_reduction
    assert switches.allow_bf16_reduced_precision_reduction


def test_the_workspace_of_cublas_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    assert cublas_workspace() == "CUBLAS_WORKSPACE_CONFIG=:4096:8"
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":0:0")
    assert "is ':0:0'; set it to :4096:8" in cublas_workspace()
