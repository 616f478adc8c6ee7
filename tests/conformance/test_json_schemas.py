"""The checked-in JSON Schema files say what the code says, and the golden events satisfy them."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from rlk_ledger_schemas.events import REGISTRY

ROOT = Path(__file__).parent.parent.parent
FOLDER = ROOT / "schemas" / "json"


@pytest.fixture(scope="module")
def tool() -> Any:
    spec = importlib.util.spec_from_file_location("export_schemas", ROOT / "tools" / "export_schemas.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_exported_schemas_have_not_drifted(tool) -> None:
    have = {path.name: path.read_text() for path in FOLDER.glob("*.json")}
    want = {name: tool.text(schema) for name, schema in tool.schemas().items()}
    assert have.keys() == want.keys(), "run `python tools/export_schemas.py`"
    for name, text in want.items():
        assert have[name] == text, f"{name} drifted: run `python tools/export_schemas.py`"


def test_every_event_type_and_every_array_is_exported() -> None:
    for name, kind in REGISTRY.items():
        schema = json.loads((FOLDER / f"event.{name}.json").read_text())
        assert schema["title"] == name
        assert schema["x-arrays"].keys() == set(kind.arrays)
        assert all(schema["x-arrays"][a]["dtype"] == spec.dtype for a, spec in kind.arrays.items())


def test_the_fields_of_the_golden_events_are_in_the_schemas() -> None:
    twin = json.loads((Path(__file__).parent / "golden-1.json").read_text())
    for event in twin["events"]:
        fields = event["fields"]
        if fields["type"] not in REGISTRY or fields["schema_version"] != 1:
            continue
        schema = json.loads((FOLDER / f"event.{fields['type']}.json").read_text())
        body = schema["$defs"][schema["$ref"].rpartition("/")[2]]
        assert fields.keys() <= body["properties"].keys()
        assert set(body["required"]) <= fields.keys() | {"type"}
