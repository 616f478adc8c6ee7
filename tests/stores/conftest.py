"""The store servers, started once and only when a test asks for one."""

import contextlib
import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import store_servers
from store_servers import Server


def _served(server: Server) -> Iterator[Server]:
    with server:
        yield server


PREFIX = "team/rl"
"""Below it the README's user, and users who lack one right of his, may do what the README's policy allows."""


def readme_policy() -> dict[str, Any]:
    """The S3 policy that the README gives, for the servers' bucket."""
    text = (Path(__file__).parents[2] / "README.md").read_text()
    (block,) = (b for b in re.findall(r"```json\n(.*?)```", text, re.DOTALL) if "s3:PutObject" in b)
    policy: dict[str, Any] = json.loads(block.replace("my-bucket", store_servers.BUCKET))
    return policy


def _without(policy: dict[str, Any], action: str | None) -> dict[str, Any]:
    statements = [{**s, "Action": [a for a in _listed(s["Action"]) if a != action]} for s in policy["Statement"]]
    return {**policy, "Statement": [s for s in statements if s["Action"]]}


def _listed(value: str | list[str]) -> list[str]:
    return [value] if isinstance(value, str) else value


def users() -> dict[str, list[dict[str, Any]]]:
    """SeaweedFS's configuration of the user `job` and of one user without each of his rights."""
    actions = [a for s in readme_policy()["Statement"] for a in _listed(s["Action"])]
    lacking = {"job": None, **{f"no-{action.partition(':')[2]}": action for action in actions}}
    return {
        "identities": [
            {
                "name": name,
                "credentials": [{"accessKey": f"{name}-key", "secretKey": f"{name}-secret"}],
                "actions": [],
                "policyNames": [name],
            }
            for name in lacking
        ],
        "policies": [
            {"name": name, "content": json.dumps(_without(readme_policy(), action))} for name, action in lacking.items()
        ],
    }


@pytest.fixture(scope="session")
def seaweedfs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    yield from _served(store_servers.SeaweedFS(tmp_path_factory.mktemp("seaweedfs"), **users()))


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


@pytest.fixture
def spool(tmp_path: Path) -> Iterator[Path]:
    """A spool directory whose shipper, which may be trying for an hour, ends with the test."""
    folder = tmp_path / "spool"
    yield folder
    with contextlib.suppress(OSError, ValueError, IndexError):
        os.kill(int((folder / "shipper.lock").read_text().split()[0]), signal.SIGKILL)
