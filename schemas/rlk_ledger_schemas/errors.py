"""Every error this project raises on purpose.

RlkError
├── UsageError          the call itself is wrong (exit code 2)
│   ├── ConfigError     init() or the environment
│   └── EventError      one event: unknown type or field, wrong type, length or range
├── FingerprintError    a value that canonical JSON cannot hold
├── AdmissionError      samples of a batch lack what consistency=strict needs
├── FormatError         bytes that are not what the format says
├── StoreError          the bucket: refused, unreachable, condition ignored
├── SpoolError          the local spool: not writable, wrong file system, budget used up
├── LedgerError         a ledger or run that is missing, newer than this reader, or damaged
└── FlushTimeout        a durability level was not reached in time

A message is one sentence or two: what, where (run, writer, seq, object, JSON path), what to do next.
"""

_LONGEST = 1000


class RlkError(Exception):
    """The root: catching it catches every error raised on purpose.

    A message that quotes something huge loses its middle: it stays a sentence, in a log and in a gap event.
    """

    def __init__(self, *args: object) -> None:
        super().__init__(*map(_shortened, args))


def _shortened(value: object) -> object:
    if not isinstance(value, str) or len(value) <= _LONGEST:
        return value
    return f"{value[:300]} [...] {value[-300:]}"


class UsageError(RlkError, ValueError):
    """The call is wrong; nothing was done."""


class ConfigError(UsageError):
    """The configuration given to init() or found in the environment is malformed."""


class EventError(UsageError):
    """An event does not have the shape its type demands."""


class FingerprintError(UsageError):
    """A value cannot be fingerprinted because canonical JSON cannot hold it exactly."""


class AdmissionError(RlkError):
    """A batch is not trained on: samples lack what strict needs and on_missing is fail."""


class FormatError(RlkError):
    """Bytes do not decode as format 1 says they must."""


class StoreError(RlkError):
    """An object store refused, failed, or does not honour put-if-absent."""


class SpoolError(RlkError):
    """The local spool cannot take an event."""


class LedgerError(RlkError):
    """A ledger, a run or one of its objects cannot be used."""


class FlushTimeout(RlkError, TimeoutError):
    """A durability level was not reached before the time-out."""
