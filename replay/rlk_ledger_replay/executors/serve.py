"""`python -m rlk_ledger_replay.executors.serve`: a worker that reads units from its input and writes their values."""

from __future__ import annotations

import os
import sys

from rlk_ledger_replay.executors.processes import CLOSE, read_message, write_message
from rlk_ledger_replay.work import Worker


def main() -> None:
    """Serve until told to close or until the other end is gone. What is printed goes to the log, not into frames."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    worker = Worker()
    while True:
        try:
            message = read_message(sys.stdin.buffer)
        except EOFError:
            return
        if message == CLOSE:
            write_message(answers, dict(worker.close()))
            return
        write_message(answers, worker.score(message))


if __name__ == "__main__":
    main()
