"""Fixtures of the recorder's tests: a recorder into a temporary spool, closed and forgotten afterwards."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rlk_ledger_sdk import api, hooks
from rlk_ledger_sdk.recorder import Recorder
from rlk_ledger_sdk.testing import SpoolImage, read_spool

Opener = Callable[..., Recorder]


@pytest.fixture(autouse=True)
def clean_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each test starts with no recorder, no hooks and none of the project's variables."""
    for name in list(os.environ):
        if name.startswith("RLK_") or name in ("RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID"):
            monkeypatch.delenv(name)
    api.close(timeout=0)
    yield
    api.close(timeout=0)
    hooks.install(None)


@pytest.fixture
def opened(tmp_path: Path) -> Opener:
    """init() into `tmp_path`, shipping off, raising on errors; options override."""

    def open_(**options: Any) -> Recorder:
        defaults: dict[str, Any] = {"run_id": "r1", "spool": tmp_path / "spool", "shipper": "off", "on_error": "raise"}
        recorder = api.init(str(tmp_path / "ledger"), **{**defaults, **options})
        assert isinstance(recorder, Recorder)
        return recorder

    return open_


@pytest.fixture
def image() -> Callable[[Recorder], SpoolImage]:
    """What a recorder has spooled so far."""
    return lambda recorder: read_spool(recorder.directory)
