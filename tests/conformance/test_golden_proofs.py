"""What makes a ledger believable is frozen too: the second golden ledger reads, and verifies, to exactly its twin."""

import base64
import importlib.util
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from rlk_ledger import layout
from rlk_ledger.audit import audit
from rlk_ledger.history import load_history
from rlk_ledger.ledger import open_ledger
from rlk_ledger.retention import Policy, prune
from rlk_ledger.verify import verify
from rlk_ledger_schemas import merkle
from rlk_ledger_schemas.checkpoints import decode_checkpoint, encode_checkpoint
from rlk_ledger_schemas.codec import leaf_hash
from rlk_ledger_schemas.errors import LedgerError
from rlk_ledger_schemas.fingerprints import canonical_json, sha256
from rlk_ledger_schemas.holds import decode_hold, encode_hold
from rlk_ledger_schemas.objects import decode_receipt, encode_receipt
from rlk_ledger_schemas.seals import decode_seal, encode_seal

pytest.importorskip("cryptography", reason="signatures are checked; `pip install .[signing]`")
HERE = Path(__file__).parent
ROOT = HERE / "golden-1-proofs"
TWIN: dict[str, Any] = json.loads((HERE / "golden-1-proofs.json").read_text())
RUN = TWIN["run"]["run_id"]


@pytest.fixture(scope="module")
def tool() -> Any:
    path = HERE.parent.parent / "tools" / "golden" / "make_golden_proofs.py"
    spec = importlib.util.spec_from_file_location("make_golden_proofs", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_golden_ledger_reads_and_verifies_to_exactly_its_twin(tool: Any) -> None:
    again = json.loads(json.dumps(tool.twin(ROOT)))
    assert again.keys() == TWIN.keys()
    for part, want in TWIN.items():
        assert again[part] == want, part


def test_it_holds_every_object_that_a_run_can_have() -> None:
    folders = {Path(path).relative_to(f"runs/{RUN}").parts[0] for path in TWIN["objects"]}
    assert folders == {"run.json", "segment", "receipt", "checkpoint", "index", "hold", "seal.json"}
    assert TWIN["standing"] == ["0123456789abcdef"]
    assert TWIN["pruned"]["segments"] == 1
    assert not any(name in "".join(TWIN["objects"]) for name in TWIN["pruned"]["graves"])


def test_the_anchor_holds_the_very_bytes_of_a_checkpoint() -> None:
    ((path, digest),) = TWIN["anchor"].items()
    assert path == f"{TWIN['ledger']['ledger_id']}/{RUN}/00000001"
    assert digest == TWIN["checkpoints"][layout.checkpoint_path(RUN, 1)]["digest"]


def test_every_object_encodes_to_the_bytes_it_was_read_from() -> None:
    for path in TWIN["objects"]:
        data = (ROOT / path).read_bytes()
        if "/receipt/" in path:
            assert encode_receipt(decode_receipt(data, path)) == data == canonical_json(TWIN["receipts"][path])
        elif "/hold/" in path:
            assert encode_hold(decode_hold(data, path)) == data == canonical_json(TWIN["holds"][path])
        elif "/checkpoint/" in path:
            found = decode_checkpoint(data, path)
            assert encode_checkpoint(found.info, found.size, found.root, found.signatures) == data
        elif path.endswith("seal.json"):
            assert encode_seal(decode_seal(data, path)) == data == canonical_json(TWIN["seal"])


def test_the_trees_are_rfc_6962_over_the_receipts_and_each_checkpoint_follows_the_one_before() -> None:
    leaves: list[bytes] = []
    previous = None
    for path in sorted(TWIN["checkpoints"]):
        said = TWIN["checkpoints"][path]
        for shipper, first, last in said["info"]["appended"]:
            paths = [layout.receipt_path(RUN, shipper, n) for n in range(first, last + 1)]
            leaves += [merkle.leaf((ROOT / p).read_bytes()) for p in paths]
        assert [leaf.hex() for leaf in leaves[-len(said["leaves"]) :]] == said["leaves"]
        assert base64.b64encode(merkle.root(leaves)).decode() == said["root"]
        assert said["info"].get("previous") == previous
        previous = said["digest"] = sha256((ROOT / path).read_bytes())


def test_what_the_tombstone_states_are_the_pruned_segments_events_with_their_leaves() -> None:
    (tombstone,) = (e["fields"] for e in TWIN["events"] if e["fields"]["type"] == "segments.pruned")
    (entry,) = tombstone["segments"]
    stated = {bytes.fromhex(envelope) for envelope in entry["statements"]}
    read = {bytes.fromhex(e["envelope"]): e["leaf"] for e in TWIN["events"]}
    assert {leaf_hash(envelope, {}).hex() for envelope in stated} == {read[envelope] for envelope in stated}
    assert len(stated) == TWIN["pruned"]["stated"] == 4


def test_hashed_tokens_and_digests_stay_what_this_key_makes_of_them(tool: Any) -> None:
    """A run may be recorded by two versions: both must make the same of one token."""
    assert [r.envelope for r in tool.rollout_step(8, 1)] == [
        bytes.fromhex(e["envelope"])
        for e in TWIN["events"]
        if e["fields"]["writer_id"] == tool.ROLLOUT and e["fields"]["seq"] in (8, 9)
    ]
    assert TWIN["tokens"]["s1"] == tool.rollout_step(8, 1)[0].arrays["response_token_ids"].tolist()
    assert b"text that is hidden" not in b"".join(p.read_bytes() for p in ROOT.rglob("*") if p.is_file())


def test_the_tool_still_makes_the_same_receipts_holds_and_events(tool: Any, tmp_path: Path) -> None:
    """Parquet libraries may change a file's bytes, and with them every digest; everything else comes out the same."""
    tool.make(tmp_path)
    again = json.loads((tmp_path / "golden-1-proofs.json").read_text())
    for part in ("ledger", "run", "holds", "standing", "tokens", "audit", "keys"):
        assert again[part] == TWIN[part], part
    for twin in (again, want := json.loads(json.dumps(TWIN))):
        for fields in twin["receipts"].values():
            fields["segment"] = {k: v for k, v in fields["segment"].items() if k == "rows"}
            for name in ("self", "previous", "signature", "root"):
                fields.pop(name, None)
    assert again["receipts"] == want["receipts"]


def test_a_flipped_bit_in_any_object_is_an_error_at_its_place(tmp_path: Path) -> None:
    for path in TWIN["objects"]:
        root = tmp_path / "ledger"
        shutil.copytree(ROOT, root)
        data = bytearray((root / path).read_bytes())
        data[len(data) // 2] ^= 1
        (root / path).write_bytes(data)
        found = verify(str(root))
        errors = [f.object for f in found.findings if f.severity == "error"]
        assert path in errors or (errors and path.endswith("run.json")), (path, found.findings)
        shutil.rmtree(root)


def test_readers_and_prune_still_know_what_is_pruned_and_held(tmp_path: Path) -> None:
    ledger = open_ledger(str(ROOT))
    assert {s.step for s in load_history(ledger, RUN).samples} == {1}
    assert "evidence.pruned" in {f.finding_id for f in audit(load_history(ledger, RUN)).findings}
    shutil.copytree(ROOT, tmp_path / "ledger")
    with pytest.raises(LedgerError, match="counsel: litigation"):
        prune(open_ledger(str(tmp_path / "ledger")), RUN, Policy(everything=True))
