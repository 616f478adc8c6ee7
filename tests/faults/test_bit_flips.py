"""Any bit of any object of a ledger is flipped: verify finds it, exits with 1 and names that object.

The published figure is that of 10,000 flips and as many in a signed ledger: `python tools/flip_bits.py 10000`.
"""

import random
from pathlib import Path

import flip_bits
import pytest

from rlk_ledger import signing
from rlk_ledger.verify import verify

KINDS = {"canary", "checkpoint", "hold", "index", "ledger.json", "receipt", "run.json", "seal.json", "segment"}
FLIPS = 150


@pytest.fixture(params=[False, True], ids=["without keys", "signed"])
def signer(request, tmp_path: Path) -> signing.Signer | None:
    return signing.new_key(tmp_path / "key.pem") if request.param else None


def test_flipped_bits_of_every_kind_of_object_are_found_and_located(signer) -> None:
    found = list(flip_bits.flips(FLIPS, seed=20_000, signer=signer))
    assert [one for one in found if one.missed is not None] == []
    assert {flip_bits.kind_of(one.path) for one in found} == KINDS


def test_the_ledger_that_is_flipped_holds_every_kind_of_object(signer) -> None:
    store = flip_bits.make_ledger(signer)
    assert {flip_bits.kind_of(path) for path in store.objects} == KINDS
    assert sum("/hold/" in path for path in store.objects) == 2, "one is placed and released"
    assert sum("/receipt/" in path for path in store.objects) == 6
    signed = [b'"signature":' in data for path, data in store.objects.items() if "/receipt/" in path]
    assert set(signed) == {signer is not None}


def test_a_flip_that_verify_overlooks_is_told(monkeypatch) -> None:
    """The tool can fail: with a verify that looks at nothing, or elsewhere, every flip is missed."""
    store, rng = flip_bits.make_ledger(), random.Random(1)
    intact = verify(store)
    monkeypatch.setattr(flip_bits, "verify", lambda *args, **options: intact)
    assert flip_bits.flip(store, rng).missed == "the verdict is intact"
    store.objects["ledger.json"] += b" "
    elsewhere = verify(store)
    monkeypatch.setattr(flip_bits, "verify", lambda *args, **options: elsewhere)
    missed = [one.missed for one in (flip_bits.flip(store, rng) for _ in range(10)) if one.path != "ledger.json"]
    assert set(missed) == {"the findings name ledger.json"}
