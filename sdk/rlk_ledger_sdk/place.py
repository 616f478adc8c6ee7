"""The spool directory: made, owned, writable and on a disk that can hold it, or refused; and who writes there."""

import os
import time

from rlk_ledger_schemas.errors import ConfigError
from rlk_ledger_schemas.frame import SpoolHeader
from rlk_ledger_sdk.config import Config
from rlk_ledger_sdk.filesystem import is_network, name_of
from rlk_ledger_sdk.process import identity


def prepare_spool(config: Config) -> None:
    """Makes the spool directory (mode 0700) and refuses one that cannot hold a spool; raises ConfigError."""
    path = config.spool
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        owner = path.stat().st_uid
        kind = name_of(str(path))
    except OSError as error:
        raise ConfigError(
            f"init: the spool {path} cannot be made ({error.strerror}); set RLK_SPOOL to a local directory."
        ) from None
    if not os.access(path, os.W_OK | os.X_OK):
        raise ConfigError(f"init: the spool {path} is not writable; set RLK_SPOOL to a local directory.")
    if owner != os.getuid() and path.name == f"rlk-{os.getuid()}":
        raise ConfigError(f"init: the spool {path} belongs to user {owner}; set RLK_SPOOL to a directory of your own.")
    if is_network(kind) and config.spool_named != kind:
        raise ConfigError(
            f"init: the spool {path} is on {kind}, whose locks and cache lose events; use a local disk, or ask for it "
            f"by name with RLK_SPOOL={kind}:{path}."
        )


def spool_header(config: Config, writer_id: str) -> SpoolHeader:
    """What the spool files of a writer of this process say of it, but for their own numbers."""
    me = identity()
    return SpoolHeader(
        writer_id=writer_id,
        run_id=config.run_id,
        ledger_url=config.url,
        file_number=0,
        first_seq=0,
        pid=me.pid,
        process_start=me.process_start,
        host=me.host,
        boot_id=me.boot_id,
        redaction=config.redaction.mode,
        redaction_key_id=config.redaction.key_id,
        consistency=config.consistency,
        roles=config.run_opened["roles"],
        opened_wall_us=time.time_ns() // 1000,
    )
