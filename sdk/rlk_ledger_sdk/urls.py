"""What a ledger URL may hold: a place, never credentials, because it is written into spools and shown everywhere."""

import re

_AUTHORITY = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://([^/?#]*)")
_WORDS = "secret|token|passw|credential|signature|(?:access|account).?key"
_NAMED = rf"sig|sv|key|X-Amz-\w+|X-Goog-\w+|[^=&#]*(?:{_WORDS})[^=&#]*"
_SIGNED = re.compile(rf"[?&](?:{_NAMED})=", re.IGNORECASE)
_ONE_SLASH = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/(?!/)")
_BUCKETS = ("s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "oss")
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


def misspelt(url: str) -> str | None:
    """What is wrong with how `url` is written, to follow its name in a sentence; None where nothing can be told."""
    short = _ONE_SLASH.match(url)
    if short is not None:
        slashes = "///" if short[1] in ("file", "local") else "//"
        return f"lacks a slash; write {url.replace('/', slashes, 1)!r}"
    scheme, sep, rest = url.partition("://")
    if sep and scheme.lower() in ("http", "https"):
        return "is a server, not a bucket: write s3://bucket/prefix, and the server into AWS_ENDPOINT_URL"
    if sep and scheme in _BUCKETS and not rest.partition("/")[0]:
        return f"names no bucket; write {scheme}://bucket/prefix"
    return None
