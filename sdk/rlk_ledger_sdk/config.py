"""One frozen Config from the arguments of init() and the environment.

Everything that can be malformed is checked here, before the first event, and answered with one ConfigError. A bucket
that cannot be reached is not a configuration error: it costs disk, never the job.
"""

import datetime
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypedDict, Unpack

import msgspec

from rlk_ledger_schemas.errors import ConfigError, EventError, UsageError
from rlk_ledger_schemas.events import check_fields, make_plain, plain
from rlk_ledger_schemas.objects import check_run_id
from rlk_ledger_sdk.choices import choice, env, nearest
from rlk_ledger_sdk.cluster import ray_labels, ray_train_place
from rlk_ledger_sdk.environment import capture
from rlk_ledger_sdk.modes import Mode, load_mode
from rlk_ledger_sdk.modes import disabled as disabled
from rlk_ledger_sdk.redaction import Redaction
from rlk_ledger_sdk.urls import holds_secret, misspelt

SCHEMES = ("file", "s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "oss", "hdfs", "memory")
ROLES = (
    *("rollout", "training", "reference", "reward", "teacher", "router"),
    *("replay", "import", "shipper", "retention"),
)
DEFAULT_BUDGET = 4 << 30
DEFAULT_BLOCK_MS = 5.0
DEFAULT_EXIT_S = 10.0
SMALLEST_BUDGET = 1 << 20

OnError = Literal["raise", "warn"]
Shipper = Literal["process", "inline", "off"]


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """How one process records. `run_opened` and `writer_opened` are the checked fields of those two events."""

    url: str
    run_id: str
    spool: Path
    spool_named: str | None
    redaction: Redaction
    shipper: Shipper
    budget_bytes: int
    block_ms: float
    exit_s: float
    on_error: OnError
    mode: Mode
    run_opened: dict[str, Any]
    writer_opened: dict[str, Any]

    @property
    def consistency(self) -> str:
        """The consistency half of the mode."""
        return self.mode.consistency

    @property
    def strict(self) -> bool:
        """Whether losing an audit event raises."""
        return self.consistency == "strict"

    @property
    def recording(self) -> bool:
        """False under `consistency = off`, where record() costs a branch."""
        return self.consistency != "off"


class Options(TypedDict, total=False):
    """The keyword arguments of init(), all optional."""

    run_id: str | None
    role: str | None
    rank: int | None
    world_size: int | None
    roles: Mapping[str, int] | None
    engine: Mapping[str, Any] | str | None
    parallel: Mapping[str, Any] | None
    mode: Mapping[str, str] | None
    on_missing: str | None
    redaction: str | None
    job: Mapping[str, Any] | None
    lineage: Mapping[str, Any] | None
    sampling_policy: Mapping[str, Any] | None
    spool: str | os.PathLike[str] | None
    shipper: str | None
    budget_bytes: int | None
    block_ms: float | None
    on_error: str | None
    environment: Mapping[str, Any] | None
    revision: Mapping[str, Any] | None


def check_options(options: Mapping[str, Any]) -> None:
    """Raises ConfigError for a keyword init() does not have, naming the nearest one."""
    known = sorted(Options.__annotations__)
    for name in options:
        if name not in known:
            raise ConfigError(f"init: {name!r} is no option; {nearest(name, known)}")


def load_config(
    url: str | os.PathLike[str] | None = None, *, parent_writer: str | None = None, **options: Unpack[Options]
) -> Config | None:
    """The Config of this process, or None where no URL is given anywhere; raises ConfigError.

    An argument wins over the environment (RLK_LEDGER, RLK_RUN_ID, RLK_ROLE, RLK_SPOOL, RLK_BUDGET_BYTES,
    RLK_BLOCK_MS, RLK_EXIT_S, RLK_FAST, RLK_CONSISTENCY, RLK_ON_MISSING, RLK_ON_ERROR, RLK_SHIPPER, RLK_REDACTION),
    which wins over what torchrun and Ray say (rank, world size, run id), which wins over the default.
    """
    check_options(options)
    url = env("RLK_LEDGER") if url is None else url
    if url is None:
        return None
    get = options.get
    mode = load_mode(get("mode"), get("on_missing"))
    run, writer = _run_opened(options, mode), _writer_opened(options, parent_writer)
    spool, spool_named = spool_place(get("spool"))
    shipper = get("shipper") or env("RLK_SHIPPER") or "process"
    under_tests = "PYTEST_CURRENT_TEST" in os.environ
    on_error = get("on_error") or env("RLK_ON_ERROR") or ("raise" if under_tests else "warn")
    _number("checkpoint_s", None, "RLK_CHECKPOINT_S", 0, 0)  # the shipper reads it; here it is refused
    _check_signing_key()
    budget = _number("budget_bytes", get("budget_bytes"), "RLK_BUDGET_BYTES", DEFAULT_BUDGET, SMALLEST_BUDGET)
    anchor = env("RLK_ANCHOR")
    if anchor is not None:
        checked_url(anchor, "RLK_ANCHOR")  # the shipper reads this one too
    address = checked_url(url, "the ledger URL")
    redaction = Redaction.load(run["redaction"], env("RLK_REDACTION_KEY"))
    run["redaction_key_id"] = redaction.key_id
    if address.startswith("memory://") and shipper == "process":
        raise ConfigError(f"init: {address} lives in one process only; pass shipper='inline', or use a directory.")
    return Config(
        url=address,
        run_id=_run_id(get("run_id")),
        spool=spool,
        spool_named=spool_named,
        redaction=redaction,
        shipper=choice("shipper", shipper, ("process", "inline", "off")),  # type: ignore[arg-type]
        budget_bytes=int(budget),
        block_ms=_number("block_ms", get("block_ms"), "RLK_BLOCK_MS", DEFAULT_BLOCK_MS, 0),
        exit_s=_number("exit_s", None, "RLK_EXIT_S", DEFAULT_EXIT_S, 0),
        on_error=choice("on_error", on_error, ("raise", "warn")),  # type: ignore[arg-type]
        mode=mode,
        run_opened=redaction.fields("run.opened", _checked("run.opened", run)),
        writer_opened=_redacted(redaction, _checked("writer.opened", writer), get("environment")),
    )


def _redacted(redaction: Redaction, writer: dict[str, Any], given: Any) -> dict[str, Any]:
    """The fields of `writer.opened` as they may leave; of the environment, what was `given` and not captured."""
    fields = redaction.fields("writer.opened", writer)
    held = fields["environment"].items()
    return {**fields, "environment": {k: redaction.free(v) if k in (given or ()) else v for k, v in held}}


def _run_opened(options: Options, mode: Mode) -> dict[str, Any]:
    """The fields of `run.opened`, not checked yet."""
    roles = options.get("roles")
    if roles is None:
        roles = {_role(options): _place(options.get("rank"), options.get("world_size"))[1]}
    return {
        "roles": dict(roles) if isinstance(roles, Mapping) else roles,
        "mode": mode.pair,
        "job": options.get("job"),
        "redaction": options.get("redaction") or env("RLK_REDACTION") or "none",
        "lineage": options.get("lineage"),
        "sampling_policy": options.get("sampling_policy"),
    }


def _writer_opened(options: Options, parent_writer: str | None) -> dict[str, Any]:
    """The fields of `writer.opened` known before there is a writer, not checked yet."""
    rank, world_size = _place(options.get("rank"), options.get("world_size"))
    engine = options.get("engine")
    return {
        "role": _role(options),
        "rank": rank,
        "world_size": world_size,
        "parallel": options.get("parallel"),
        "engine": {"name": engine} if isinstance(engine, str) else engine,
        "parent_writer": parent_writer,
        "environment": {**capture(), **_mapping("environment", options.get("environment"))},
        "revision": options.get("revision"),
        "labels": ray_labels() or None,
    }


def _role(options: Options) -> str:
    return choice("role", options.get("role") or env("RLK_ROLE") or "training", ROLES)


def _number(what: str, value: Any, variable: str, default: float, least: float) -> float:
    text = env(variable) if value is None else value
    source = what if value is not None else variable
    if text is None:
        return default
    try:
        if isinstance(text, bool):
            raise ValueError
        number = float(text)
    except (TypeError, ValueError):
        raise ConfigError(f"init: {source} must be a number, got {text!r}.") from None
    if not least <= number < float("inf"):
        raise ConfigError(f"init: {source} must be at least {least:g}, got {text!r}.")
    return number


def _check_signing_key() -> None:
    """Raises ConfigError when RLK_SIGNING_KEY names no PEM private key; only the shipper, which signs, can load it."""
    path = env("RLK_SIGNING_KEY")
    if path is None:
        return
    try:
        found = b"PRIVATE KEY-----" in Path(path).expanduser().read_bytes()
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise ConfigError(f"init: RLK_SIGNING_KEY {path!r} cannot be read: {why}.") from None
    if not found:
        raise ConfigError(f"init: RLK_SIGNING_KEY {path!r} holds no private key; `rlk-ledger keygen` makes one.")


def _mapping(what: str, value: Any) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ConfigError(f"init: {what} must be a mapping, got {type(value).__name__}.")
    return dict(value)


def _checked(type_name: str, fields: dict[str, Any]) -> dict[str, Any]:
    try:
        present = {k: plain(v) for k, v in fields.items() if v is not None}
        make_plain(type_name, check_fields(type_name, dict(present))[0])
    except RecursionError:
        raise ConfigError(f"init: what is given for {type_name} is nested too deep, or holds itself.") from None
    except EventError as error:
        raise ConfigError(f"init: {str(error).removeprefix(type_name + ': ')}") from None
    return present


def checked_url(url: Any, what: str) -> str:
    """The URL of a ledger or an anchor; a local path becomes absolute, because the shipper runs elsewhere.

    Raises ConfigError, naming `what` it was to be.
    """
    text = os.fspath(url) if isinstance(url, str | os.PathLike) else None
    if not isinstance(text, str) or not text.strip() or "\n" in text or not _is_path(text):
        raise ConfigError(f"init: {what} {url!r} is not a path or a URL such as s3://bucket/prefix.")
    if holds_secret(text):
        raise ConfigError(f"init: {what} holds credentials; put them in the environment, not in the URL.")
    wrong = misspelt(text)
    if wrong is not None:
        raise ConfigError(f"init: {what} {text!r} {wrong}.")
    scheme, sep, rest = text.partition("://")
    if not sep:
        return str(Path(text).expanduser().absolute())
    if scheme not in SCHEMES:
        hint = nearest(scheme, SCHEMES)
        raise ConfigError(f"init: {what} {text!r} has the unknown scheme {scheme!r}; {hint}")
    if not rest.strip("/"):
        raise ConfigError(f"init: {what} {text!r} names no bucket or path.")
    return text


def _is_path(text: str | bytes) -> bool:
    try:
        return b"\0" not in os.fsencode(text) and bool(os.fsdecode(text).encode())
    except UnicodeError:
        return False


def _run_id(run_id: Any) -> str:
    if run_id is None:
        elastic = env("TORCHELASTIC_RUN_ID")
        run_id = env("RLK_RUN_ID") or (elastic if elastic and elastic != "none" else None)
    if run_id is None:
        now = datetime.datetime.now(datetime.UTC)
        run_id = f"run-{now:%Y%m%d-%H%M%S}-{os.urandom(3).hex()}"
    try:
        return check_run_id(run_id)
    except UsageError as error:
        raise ConfigError(f"init: {error}") from None


def _place(rank: Any, world_size: Any) -> tuple[int, int]:
    """(rank, world size): arguments, else torchrun's RANK and WORLD_SIZE, else Ray Train's context, else 0 of 1."""
    ray = ray_train_place() if rank is None and world_size is None and env("RANK") is None else None
    given = (rank, world_size) if ray is None else ray
    place = []
    for what, value, variable, default in (("rank", given[0], "RANK", 0), ("world_size", given[1], "WORLD_SIZE", 1)):
        raw = value if value is not None else env(variable) if rank is None else None
        raw = default if raw is None else raw
        if isinstance(raw, bool):
            raise ConfigError(f"init: {what} must be an integer, got {raw!r}.")
        try:
            place.append(int(raw) if isinstance(raw, str) else raw.__index__())
        except (ValueError, AttributeError, TypeError):
            raise ConfigError(f"init: {what} must be an integer, got {raw!r}.") from None
    if world_size is None and rank is not None:
        place[1] = max(place[1], place[0] + 1)
    if not 0 <= place[0] < place[1]:
        raise ConfigError(f"init: rank {place[0]} is outside a world of {place[1]}; ranks start at 0.")
    return place[0], place[1]


def spool_folder() -> Path:
    """This user's spool directory, as RLK_SPOOL or the default says; raises ConfigError."""
    return spool_place()[0]


def spool_place(spool: Any = None) -> tuple[Path, str | None]:
    """(spool directory, network file system asked for by name) of `spool`, else RLK_SPOOL; raises ConfigError.

    `nfs:/mnt/x` names a file system that is else refused.
    """
    text = env("RLK_SPOOL") if spool is None else spool
    if text is None:
        return Path(f"/var/tmp/rlk-{os.getuid()}"), None
    if not isinstance(text, str | os.PathLike) or not os.fspath(text):
        raise ConfigError(f"init: spool must be a directory path, got {text!r}.")
    path = os.fspath(text)
    if not _is_path(path):
        raise ConfigError(f"init: spool {path!r} is no path on this system.")
    named = re.match(r"([a-z0-9]+):(?=/)", str(path))
    if named:
        return Path(str(path)[named.end() :]).absolute(), named[1]
    return Path(str(path)).expanduser().absolute(), None
