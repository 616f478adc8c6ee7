"""A process that does items one after the other, so that what breaks it does not break the check.

Speaks lines: an `Item` as JSON comes in, `ROW` and a row as JSON go out, then `DONE` or `BROKEN` with a reason. What
kernels and libraries print beside that is ignored.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext

import msgspec

from device_check import work
from device_check.compiled import Compiling
from device_check.kept import Kept
from device_check.work import Item, run, synchronize

SM = "sm_"
ROW, DONE, BROKEN = "ROW ", "DONE", "BROKEN "


def serve(device: str) -> None:
    """Do items until the input ends; a device that no longer answers ends the process.

    device: `cuda`, `cpu`, or `sm_90` and the like, for which kernels are compiled on the CPU and never launched.
    """
    if device.startswith(SM):
        work.compiling = Compiling(int(device.removeprefix(SM)))
        device = "cpu"
    with Kept() if device == "cuda" else nullcontext():
        _serve(device)


def _serve(device: str) -> None:
    for line in sys.stdin:
        item = msgspec.json.decode(line, type=Item)
        try:
            for row in run(item, device):
                _tell(ROW + msgspec.json.encode(row).decode())
            synchronize(device)
        except Exception as error:
            _tell(
                BROKEN + f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
            )
            return
        _tell(DONE)


def _tell(line: str) -> None:
    sys.stdout.write(f"\n{line}\n")
    sys.stdout.flush()
