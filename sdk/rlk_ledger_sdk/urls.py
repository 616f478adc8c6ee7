"""What a ledger URL may hold: a place, never credentials, because it is written into spools and shown everywhere."""

import re

_AUTHORITY = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://([^/?#]*)")
_SIGNED = re.compile(r"[?&](sig|signature|sv|token|key|secret|X-Amz-\w+|X-Goog-\w+)=", re.IGNORECASE)
_WITH_CONTAINER = ("abfs", "abfss", "az", "adl")


def holds_secret(url: str) -> bool:
    """Whether `url` carries a key, a password or a signature: `s3://key:secret@bucket`, `az://box/x?sig=...`.

    Azure's `abfss://container@account.dfs.core.windows.net/x` and a user without a password are none.
    """
    match = _AUTHORITY.match(url)
    if match is None:
        return False
    user, at, _ = match[1].rpartition("@")
    named = url.partition("://")[0].lower() in _WITH_CONTAINER
    return (bool(at) and (":" in user or not named)) or _SIGNED.search(url) is not None
