"""One name for a completion, the same in the front end and in the engine core."""

import os
import re

_INTERNAL = re.compile(r"(?:(\d+)_)?(.+)-[0-9a-f]{8}")
_PLAIN = re.compile(r"(?:(\d+)_)?(.+)")


def completion(request_id: str, index: int, prefix: str) -> str:
    """`<request id>-<index>`; ids that vLLM counted up from 0 itself carry `prefix`, the front end's writer id."""
    request = f"{prefix}-{request_id}" if request_id.isdigit() else request_id
    return f"{request}-{index}"


def of_internal(internal_id: str, prefix: str) -> str:
    """The same from the id the engine core uses: `[<index>_]<request id>-<8 random hex digits>`."""
    found = _parts(internal_id)
    return internal_id if found is None else completion(found[2], int(found[1] or 0), prefix)


def request_of(internal_id: str) -> str:
    """The request id the caller knows, from the one the engine core uses."""
    found = _parts(internal_id)
    return internal_id if found is None else found[2]


def _parts(internal_id: str) -> "re.Match[str] | None":
    random = os.environ.get("VLLM_DISABLE_REQUEST_ID_RANDOMIZATION", "0") not in ("1", "true", "True")
    return (_INTERNAL if random else _PLAIN).fullmatch(internal_id) or _PLAIN.fullmatch(internal_id)
