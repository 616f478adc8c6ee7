"""Exports the event types and ledger objects as JSON Schema files, the normative list of wire names and types.

    python tools/export_schemas.py [DIR]      (default: schemas/json)

Arrays are not part of an envelope; each event schema lists them under `x-arrays`.
"""

import json
import sys
from pathlib import Path
from typing import Any

import msgspec

from rlk_ledger_schemas.checkpoints import CheckpointInfo
from rlk_ledger_schemas.events import REGISTRY, EventType, envelope_struct
from rlk_ledger_schemas.frame import SpoolHeader
from rlk_ledger_schemas.holds import Hold
from rlk_ledger_schemas.objects import LedgerInfo, Receipt, RunInfo
from rlk_ledger_schemas.seals import Seal

DIALECT = "https://json-schema.org/draft/2020-12/schema"
OBJECTS = {
    "ledger.json": LedgerInfo,
    "run.json": RunInfo,
    "receipt": Receipt,
    "checkpoint.extension": CheckpointInfo,
    "seal.json": Seal,
    "hold": Hold,
    "spool.header": SpoolHeader,
}


def schemas() -> dict[str, dict[str, Any]]:
    """File name -> schema of every event type and every object."""
    out = {f"event.{name}.json": _event(name, kind) for name, kind in REGISTRY.items()}
    for name, kind in OBJECTS.items():
        out[f"object.{name.removesuffix('.json')}.json"] = {"$schema": DIALECT, **msgspec.json.schema(kind)}
    return dict(sorted(out.items()))


def _event(name: str, kind: EventType) -> dict[str, Any]:
    arrays = {
        array: {"dtype": spec.dtype, "required": spec.required, "tokens": spec.tokens, "description": spec.doc}
        for array, spec in sorted(kind.arrays.items())
    }
    envelope = envelope_struct(kind)
    schema = msgspec.json.schema(envelope)
    # A recorder refuses unknown fields; readers keep those of a newer writer, and the schema is for readers.
    schema["$defs"][envelope.__name__].pop("additionalProperties", None)
    return {
        "$schema": DIALECT,
        "title": name,
        "description": (kind.public.__doc__ or "").partition("\n")[0],
        **schema,
        "x-arrays": arrays,
    }


def text(schema: dict[str, Any]) -> str:
    """The file's text."""
    return json.dumps(schema, indent=2, sort_keys=True) + "\n"


def export(folder: Path) -> None:
    """Writes every schema file and removes those of types that are gone."""
    folder.mkdir(parents=True, exist_ok=True)
    wanted = schemas()
    for path in folder.glob("*.json"):
        if path.name not in wanted:
            path.unlink()
    for name, schema in wanted.items():
        (folder / name).write_text(text(schema))


if __name__ == "__main__":
    default = Path(__file__).parent.parent / "schemas" / "json"
    export(Path(sys.argv[1]) if len(sys.argv) > 1 else default)
