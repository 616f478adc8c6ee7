"""Records field cases through the recorder: `record_cases.py LEDGER SPOOLS CASE...`, each case a run of its name.

One forked process per writer, each with its own `init` and `record` calls, then one pass of the shipper a case.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import rlk_ledger

_OPENED = ("role", "rank", "world_size", "engine", "parallel")
_RUN_FIELDS = ("roles", "mode", "redaction", "job")


def main(case: Path, ledger: str, spool: str) -> None:
    """Records every writer's lines and ships them."""
    text = (case / "events.jsonl").read_text()
    lines = [json.loads(line, object_hook=_floats) for line in text.splitlines()]
    opened = next(line for line in lines if line["type"] == "run.opened")
    shared = {name: opened[name] for name in _RUN_FIELDS if name in opened} | {"run_id": case.name}
    shared |= {"redaction": os.environ["RLK_REDACTION"]} if "RLK_REDACTION" in os.environ else {}
    for writer in dict.fromkeys(line["writer"] for line in lines):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                record([line for line in lines if line["writer"] == writer], shared, ledger, spool)
                code = 0
            finally:
                os._exit(code)
        if os.waitpid(child, 0)[1] != 0:
            raise SystemExit(f"writer {writer} failed")
    from rlk_ledger.service import ship_once

    errors = ship_once(Path(spool), keep=False)
    if errors:
        raise SystemExit("; ".join(errors))


def record(lines: list[dict[str, Any]], shared: dict[str, Any], ledger: str, spool: str) -> None:
    """One writer: what `init` is given, then one record() a line."""
    own = next(line for line in lines if line["type"] == "writer.opened")
    options: dict[str, Any] = {name: own[name] for name in _OPENED if name in own} | shared
    rlk_ledger.init(ledger, spool=spool, shipper="off", on_error="raise", **options)
    contracts: dict[str, str] = {}
    for line in lines:
        fields = {key: value for key, value in line.items() if key not in ("writer", "type", "contract")}
        if line["type"] in ("run.opened", "writer.opened"):
            continue
        if line["type"] == "logprobs":
            fields["contract_id"] = contracts[line["contract"]]
        reference = rlk_ledger.record(line["type"], **fields)
        if line["type"] == "contract.declared":
            contracts[line["contract"]] = reference.contract_id
    rlk_ledger.close(timeout=0)


def _floats(fields: dict[str, Any]) -> dict[str, Any]:
    """The floats JSON lacks, in arrays of values."""
    if isinstance(fields.get("values"), list):
        fields["values"] = [float(v) for v in fields["values"]]
    return fields


if __name__ == "__main__":
    for name in sys.argv[3:]:
        main(Path(name), sys.argv[1], str(Path(sys.argv[2]) / Path(name).name))
