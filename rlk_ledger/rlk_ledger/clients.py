"""The fsspec client of a URL: no listing cache, bounded waits, few retries, one client a process.

Endpoints and credentials come from where the client itself looks: its environment variables and fsspec's configuration
(FSSPEC_CONFIG_DIR, FSSPEC_S3 ...). What the user set there is left as it is; only what is unset is filled in here.
"""

import asyncio
import logging
import os
import re
import weakref
from collections.abc import Mapping
from types import MethodType
from typing import Any

from rlk_ledger_schemas.errors import ConfigError

CONNECT_S, ANSWER_S = 5, 15
"""Seconds until a connection stands, and seconds of silence, before a client gives one attempt up."""
CALL_S, LONG_S = 60.0, 600.0
"""Seconds until a call is given up whatever the client does: one about one object, one without a bound on its size."""
SLOWEST = 250_000
"""Bytes a second below which an upload is given up."""

PACKAGES = {"s3": "s3fs", "gcs": "gcsfs", "azure": "adlfs"}
"""The client behind each extra of ours."""
EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs", "az": "azure", "abfs": "azure", "abfss": "azure"}
"""The extra that brings the client of a protocol."""
_PERMISSIONS = {
    "s3": {"create": "s3:PutObject", "read": "s3:GetObject", "list": "s3:ListBucket", "delete": "s3:DeleteObject"},
    "gcs": {
        verb: f"storage.objects.{verb if verb != 'read' else 'get'}" for verb in ("create", "read", "list", "delete")
    },
    "azure": {
        "create": "blobs/write (Storage Blob Data Contributor)",
        "read": "blobs/read (Storage Blob Data Reader)",
        "list": "blobs/read (Storage Blob Data Reader)",
        "delete": "blobs/delete (Storage Blob Data Contributor)",
    },
}
_CREDENTIALS = {
    "s3": "set AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
    "gcs": "set GOOGLE_APPLICATION_CREDENTIALS",
    "azure": "set AZURE_STORAGE_CONNECTION_STRING, or AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
}
_ENDPOINTS = {"s3": " (AWS_ENDPOINT_URL)", "azure": " (the account's name)"}
_NO_CREDENTIALS = re.compile(r"locate credentials|connection.string|default credentials", re.IGNORECASE)
_NO_SERVER = re.compile(
    r"could not connect|cannot connect|connect call failed|name or service not known|connection refused|"
    r"name resolution|invalid endpoint",
    re.IGNORECASE,
)
_ENVIRONMENT = ("AWS_", "AZURE_", "GOOGLE_", "GCSFS_", "STORAGE_EMULATOR_HOST")
# Keyed by process too: a client works on a thread that does not survive a fork.
_held: dict[tuple[Any, ...], Any] = {}


def _let_go_in_child() -> None:
    """In a forked child: drops finalizers of inherited clients, which at exit wait for the thread that is not there."""
    running = asyncio._get_running_loop()
    for pending in list(getattr(weakref.finalize, "_registry", ())):
        alive = pending.peek()
        loops = [arg for arg in alive[2] if isinstance(arg, asyncio.AbstractEventLoop)] if alive else []
        if loops and running not in loops:
            pending.detach()


os.register_at_fork(after_in_child=_let_go_in_child)


def connect(url: str, protocol: str) -> tuple[Any, str]:
    """(file system, root path in it) of an fsspec URL; contacts nothing. Raises ConfigError."""
    try:
        import fsspec

        kind = _kind(fsspec.get_filesystem_class(protocol), protocol)
        options = {**kind._get_kwargs_from_urls(url), **_filled_in(kind, EXTRAS.get(protocol, protocol))}
        root = str(kind._strip_protocol(url)).rstrip("/")
        options.pop("path", None)
        environment = tuple(sorted(item for item in os.environ.items() if item[0].startswith(_ENVIRONMENT)))
        key = (os.getpid(), protocol, repr(sorted(options.items())), environment)
        if key not in _held:
            _held[key] = _patient(kind(**options, skip_instance_cache=True), EXTRAS.get(protocol, protocol))
        return _held[key], root
    except ImportError as error:
        extra = EXTRAS.get(protocol)
        how = f'pip install "rlk-ledger[{extra}]"' if extra else f"install the fsspec client for {protocol}://"
        raise ConfigError(f"{url}: the client for {protocol}:// is not installed ({error}); {how}.") from None
    except ValueError as error:
        text = str(error).splitlines()[0].rstrip("!. ")
        then = advice(protocol, text) or "use a path, file://, s3://, gs:// or az://"
        raise ConfigError(f"{url}: {text}; {then}.") from None


def permission(protocol: str, verb: str) -> str:
    """What the store's own language calls the right to `verb` (create, read, list, delete)."""
    return _PERMISSIONS.get(EXTRAS.get(protocol, protocol), {}).get(verb, verb)


def advice(protocol: str, text: str) -> str | None:
    """What to do about a client's own sentence: no credentials, or nobody at the address; None for any other."""
    client = EXTRAS.get(protocol, protocol)
    if _NO_CREDENTIALS.search(text):
        return _CREDENTIALS.get(client)
    if _NO_SERVER.search(text):
        return f"check the network and the endpoint{_ENDPOINTS.get(client, '')}"
    return None


def _kind(kind: Any, protocol: str) -> Any:
    """The class that serves `protocol`.

    gcsfs' class for zonal buckets asks a gRPC service about every bucket first, a minute each where there is none: it
    is used only where the environment asks for it by name.
    """
    if EXTRAS.get(protocol) == "gcs" and "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT" not in os.environ:
        from gcsfs.core import GCSFileSystem

        return GCSFileSystem
    return kind


def _filled_in(kind: Any, client: str) -> dict[str, Any]:
    """Options of a client that the user's fsspec configuration leaves open."""
    from fsspec.config import apply_config

    given: Mapping[str, Any] = apply_config(kind, {})
    options: dict[str, Any] = {}
    if client in ("s3", "gcs", "azure"):
        options["use_listings_cache"] = False  # a cache would hide what other processes write
    if client == "s3":
        ours = {"connect_timeout": CONNECT_S, "read_timeout": ANSWER_S}
        ours["retries"] = {"mode": "standard", "total_max_attempts": 2}  # type: ignore[assignment]
        options["config_kwargs"] = {**ours, **(given.get("config_kwargs") or {})}
    elif client == "gcs" and "requests_timeout" not in given:
        import aiohttp

        options["requests_timeout"] = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=ANSWER_S)
    elif client == "azure":
        ours = {"connection_timeout": CONNECT_S, "read_timeout": ANSWER_S}
        options |= {name: value for name, value in ours.items() if name not in given}
    return options


def _patient(fs: Any, client: str) -> Any:
    """`fs` with retries that do not multiply into minutes: whoever ships tries again anyway, with growing pauses."""
    if client == "s3":
        fs.retries = 2
    elif client == "gcs":
        _retry_less(fs)
    service = getattr(fs, "service_client", None)
    policy = getattr(getattr(service, "_config", None), "retry_policy", None)
    if policy is not None and hasattr(policy, "initial_backoff"):  # adlfs has no option for it; its first pause is 15 s
        policy.total_retries, policy.initial_backoff, policy.increment_base = 2, 0, 1
        policy.random_jitter_range = 1
    return fs


def _retry_less(fs: Any) -> None:
    """Three attempts where gcsfs, which has no option for it, makes six; it would log each failure with a traceback."""
    from gcsfs.retry import retry_request

    request = getattr(type(fs)._request, "__wrapped__", None)
    if request is not None:
        fs._request = MethodType(retry_request(retries=3)(request), fs)
    for name in ("gcsfs", "google.auth"):  # handlers of the user's own still hear of it
        logging.getLogger(name).addHandler(logging.NullHandler())
