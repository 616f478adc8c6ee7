"""A run of many short chains, and what to check of its checkpoints."""

import hashlib
from pathlib import Path

from rlk_ledger import checkpoints, layout
from rlk_ledger.build import event
from rlk_ledger.chain import Chain, new_shipper
from rlk_ledger.contact import meet
from rlk_ledger.store import FileStore, open_store
from rlk_ledger_schemas.merkle import root
from rlk_ledger_schemas.objects import FORMAT, RunInfo

RUN = "r1"


class Many:
    """Chains of one run that grow by one receipt at a time."""

    def __init__(self, url: str, signer=None) -> None:
        self.store = open_store(url)
        declared = RunInfo(
            format=FORMAT, ledger_id="", run_id=RUN, roles={}, mode={}, redaction="none", created_us=0
        )  # fmt: skip
        self.contact = meet(self.store, declared)
        self.chains: list[Chain] = []
        self.signer = signer

    def chain(self) -> Chain:
        self.chains.append(Chain(self.store, self.contact, new_shipper(), signer=self.signer))
        return self.chains[-1]

    def grow(self, chain: Chain, count: int = 1) -> None:
        for _ in range(count):
            fields = {"weight_version": f"v{chain.n}", "digest": "sha256:00", "tensor_count": 1}
            chain.publish(chain.draft([event(RUN, chain.shipper, chain.n, "weights.published", **fields)]))


class Stale(FileStore):
    """Listings miss whatever names one of `hidden`, as those that are behind do; what is asked for by name is there."""

    def __init__(self, root: Path, hidden: set[str]) -> None:
        super().__init__(root)
        self.hidden = hidden

    def list(self, prefix: str):
        return (e for e in super().list(prefix) if not any(h in e.path for h in self.hidden))

    def children(self, prefix: str) -> tuple[str, ...]:
        return tuple(c for c in super().children(prefix) if not any(h in c for h in self.hidden))


def checked(store) -> list:
    """Every checkpoint, after checking that together they are one RFC 6962 log over the receipts of the bucket."""
    found = checkpoints.read_checkpoints(store, RUN)
    leaves = []
    for k, checkpoint in enumerate(found):
        assert checkpoint.k == k
        for shipper, n, leaf in checkpoint.receipts():
            data = store.read(layout.receipt_path(RUN, shipper, n))
            assert leaf == hashlib.sha256(b"\0" + data).digest()
            leaves.append(leaf)
        assert (checkpoint.size, checkpoint.root) == (len(leaves), root(leaves))
    assert len(set(leaves)) == len(leaves)
    return found
