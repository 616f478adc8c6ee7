"""Tokens as a reader sees them: bytes where the tokenizer is bytes, ids where it is not."""

from rlk_ledger.history import Sample
from rlk_ledger_replay.report.text import clean

_PROMPT = 240
_LARGEST_ID = 2**31 - 1
_SIGN_OF = {0x20: "\u2423", 0x0A: "\u23ce", 0x09: "\u21e5"}
SIGNS = frozenset(_SIGN_OF.values())
"""What stands for a space, a line end and a tab."""


def is_bytes(sample: Sample) -> bool:
    """Whether the sample's token ids below 256 are bytes."""
    return sample.dims.get("tokenizer") == "bytes" and not is_redacted(sample)


def is_redacted(sample: Sample) -> bool:
    """Whether the sample holds keyed hashes in place of token ids."""
    return sample.response_token_ids.dtype.itemsize == 8


def token_text(token: int | None, as_bytes: bool) -> str:
    """A token as a cell shows it: the character of a byte, its hexadecimal value where it has none, else the id.

    Of a hash that stands for an id under redaction the last four hexadecimal digits are shown.
    """
    if token is None:
        return "·"
    if token > _LARGEST_ID:
        return f"{token & 0xFFFF:04x}"
    if not as_bytes or not 0 <= token < 256:
        return f"{token}"
    return _SIGN_OF.get(token) or (chr(token) if 0x21 <= token < 0x7F else f"{token:02X}")


def prompt_text(sample: Sample) -> str:
    """The end of a byte-level prompt as text; empty where the prompt is not recorded or its tokens are not bytes."""
    if sample.prompt_token_ids is None or not is_bytes(sample):
        return ""
    ids = [int(token) for token in sample.prompt_token_ids if 0 <= int(token) < 256]
    text = clean(bytes(ids).decode("utf-8", errors="replace"))
    return text if len(text) <= _PROMPT else "..." + text[-_PROMPT:]
