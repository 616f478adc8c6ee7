"""Which samples a segment's events name, as its receipt says it: prints of three bytes.

    print   = the first 3 bytes of SHA-256(sample id, UTF-8)
    samples = base64 of the prints of every sample id among the events, sorted, each once

A reader that looks for one sample opens only segments whose prints hold its own; of n ids a segment is opened for
nothing once in 2^24 / n times. A segment of more than AT_MOST ids says nothing: it is always opened.
"""

import base64
import hashlib
from collections.abc import Iterable

from rlk_ledger_schemas.errors import FormatError

PRINT_BYTES = 3
AT_MOST = 1 << 16


def sample_print(sample_id: str) -> bytes:
    """The three bytes that stand for a sample id."""
    return hashlib.sha256(sample_id.encode(errors="surrogatepass")).digest()[:PRINT_BYTES]


def encode_samples(sample_ids: Iterable[str]) -> str | None:
    """The `samples` of a receipt; None when there are more than AT_MOST ids."""
    ids = set(sample_ids)
    if len(ids) > AT_MOST:
        return None
    return base64.b64encode(b"".join(sorted({sample_print(name) for name in ids}))).decode()


def decode_samples(samples: str) -> bytes:
    """The prints, one after the other; raises FormatError."""
    try:
        data = base64.b64decode(samples, validate=True)
    except ValueError:
        data = b"?"
    if len(data) % PRINT_BYTES or base64.b64encode(data).decode() != samples:
        raise FormatError(f"`samples` is not base64 of prints of {PRINT_BYTES} bytes: {samples[:40]!r}.")
    return data
