"""`kernels`: what the deterministic operators promise on this device, and whether they keep it."""

from __future__ import annotations

import os
from contextlib import nullcontext
from typing import Any

import click

from rlk_ledger import terminal
from rlk_ledger_schemas.errors import UsageError

_EXIT = {"pass": 0, "fail": 1, "inconclusive": 3}


@click.group()
def kernels() -> None:
    """Check the deterministic kernels on this device."""


@kernels.command()
@click.option("--backend", "backends", multiple=True, metavar="NAME", help="Only this backend; repeatable.")
@click.option("--operator", "operators", multiple=True, metavar="NAME", help="Only this operator; repeatable.")
@click.option("--device", type=click.Choice(["cpu", "cuda"]), help="Where to run; by default cuda where torch sees it.")
@click.option("--interpret", is_flag=True, help="Run Triton kernels in Triton's interpreter, on the CPU.")
@click.option(
    "--size",
    type=click.Choice(["small", "large"]),
    default="small",
    show_default=True,
    help="small takes seconds on a CPU; large has the shapes of an 8B model and wants a GPU.",
)
@terminal.ledger_option
@click.option("--run-id", help="The run the certificate goes into; by default a new one.")
@click.option(
    "--record/--no-record", default=None, help="Write the certificate into the ledger; by default where one is named."
)
@terminal.output_options
@click.pass_context
def check(
    ctx: click.Context,
    backends: tuple[str, ...],
    operators: tuple[str, ...],
    device: str | None,
    interpret: bool,
    size: str,
    url: str | None,
    run_id: str | None,
    record: bool | None,
    as_json: bool,
) -> None:
    """Prove the operators on this device and write the certificate.

    Every backend this device can run goes through the suites: invariance (the same bits in any batch, position,
    padding, packing, chunking, cache state), accuracy against the float32 reference, parity between backends, and the
    bits recorded for this class of device. Deliberately wrong operators go through them too and must be caught. Exit
    codes: 0 all kept; 1 something is broken; 3 what was named could not be measured; 2 usage.
    """
    if interpret:
        if device == "cuda":
            raise click.UsageError("--interpret runs Triton kernels on the CPU; leave --device cuda out.")
        os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined, so before any is imported
    keep = _keep(record, url, run_id)
    from rlk_ledger_kernels.errors import ContractError
    from rlk_ledger_kernels.suite.certificate import Scope, certify
    from rlk_ledger_replay import kernels_screen, screen
    from rlk_ledger_replay.kernels_record import record_certificate

    scope = Scope(device or _default_device(interpret), size, operators, backends)  # type: ignore[arg-type]
    bar = None if as_json else screen.Bar(terminal.console(stderr=True))
    try:
        with bar or nullcontext():
            certificate = certify(scope, kernels_screen.follow(bar))
    except ContractError as error:
        raise UsageError(f"{error}.") from None
    record_of = record_certificate(url, run_id, certificate) if keep else None
    code = _EXIT[certificate.verdict]
    if as_json:
        told: dict[str, Any] = {"run_id": None, "not_recorded": "recording was not asked for"}
        if record_of is not None:
            told = {"run_id": record_of.run_id, "not_recorded": record_of.not_recorded}
        terminal.echo_json({**certificate.to_event(), **told, "exit_code": code})
    else:
        kernels_screen.show(certificate, record_of)
    ctx.exit(code)


def _keep(record: bool | None, url: str | None, run_id: str | None) -> bool:
    """Whether to record; raises click.UsageError where that was asked for and no ledger is known."""
    if record or (run_id is not None and record is None):
        terminal.require_url(url)
    return bool(url) if record is None else record


def _default_device(interpret: bool) -> str:
    import torch

    return "cuda" if torch.cuda.is_available() and not interpret else "cpu"
