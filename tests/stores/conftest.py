"""The store servers, started once and only when a test asks for one."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import store_servers
from store_servers import Server


def _served(server: Server) -> Iterator[Server]:
    with server:
        yield server


@pytest.fixture(scope="session")
def seaweedfs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    yield from _served(store_servers.SeaweedFS(tmp_path_factory.mktemp("seaweedfs")))


@pytest.fixture(scope="session")
def moto() -> Iterator[Server]:
    yield from _served(store_servers.Moto())


@pytest.fixture(scope="session")
def azurite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    yield from _served(store_servers.Azurite(tmp_path_factory.mktemp("azurite")))


@pytest.fixture(scope="session")
def fake_gcs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    yield from _served(store_servers.FakeGcs(tmp_path_factory.mktemp("gcs")))


@pytest.fixture(scope="session")
def careless_gcs() -> Iterator[Server]:
    yield from _served(store_servers.CarelessGcs())


@pytest.fixture(params=["seaweedfs", "moto", "azurite", "fake_gcs"])
def server(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Server:
    """Each server in turn, its environment set."""
    found: Server = request.getfixturevalue(request.param)
    for name, value in found.environ.items():
        monkeypatch.setenv(name, value)
    return found


@pytest.fixture
def name(tmp_path: Path) -> str:
    """The name of a ledger nobody used before."""
    return f"{tmp_path.parent.name}-{tmp_path.name}"
