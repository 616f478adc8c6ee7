"""What record() returns."""

import msgspec


class Reference(msgspec.Struct, gc=False):
    """Names one recorded event: (writer_id, seq), and contract_id for `contract.declared`.

    `seq` is None when nothing was stored: recording is off, the event was rejected or dropped (a gap event says so),
    or the call came from a signal handler that interrupted another record(); then it is filled in when that one ends.
    """

    writer_id: str | None
    seq: int | None
    contract_id: str | None = None


NOT_RECORDED = Reference(None, None)
