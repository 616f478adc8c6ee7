"""Many makers of checkpoints at once on real stores: one tree, whoever wins, and every receipt in it once."""

import threading

from rlk_ledger import checkpoints, layout
from rlk_ledger.build import event
from rlk_ledger.chain import Chain, new_shipper
from rlk_ledger.contact import meet
from rlk_ledger.store import open_store
from rlk_ledger.verify import verify
from rlk_ledger_schemas.findings import Exit
from rlk_ledger_schemas.merkle import leaf, root
from rlk_ledger_schemas.objects import FORMAT, RunInfo

RUN = "r1"


def test_makers_that_race_on_a_real_store_make_one_log(server, name: str) -> None:
    url = server.url(name)
    store = open_store(url)
    declared = RunInfo(format=FORMAT, ledger_id="", run_id=RUN, roles={}, mode={}, redaction="none", created_us=0)
    contact = meet(store, declared)
    failures: list[BaseException] = []
    shipped = threading.Event()

    def ship() -> None:
        chain = Chain(store, contact, new_shipper())
        for n in range(5):
            fields = {"weight_version": f"v{n}", "digest": "sha256:00", "tensor_count": 1}
            chain.publish(chain.draft([event(RUN, chain.shipper, n, "weights.published", **fields)]))

    def make() -> None:
        try:
            while not shipped.is_set():
                checkpoints.make(open_store(url), RUN)
        except BaseException as error:
            failures.append(error)

    shippers = [threading.Thread(target=ship) for _ in range(3)]
    makers = [threading.Thread(target=make) for _ in range(4)]
    for thread in [*shippers, *makers]:
        thread.start()
    for thread in shippers:
        thread.join()
    shipped.set()
    for thread in makers:
        thread.join()
    assert failures == []
    checkpoints.make(store, RUN)
    leaves = []
    for checkpoint in checkpoints.read_checkpoints(store, RUN):
        for shipper, n, held in checkpoint.receipts():
            assert held == leaf(store.read(layout.receipt_path(RUN, shipper, n)))
            leaves.append(held)
        assert (checkpoint.size, checkpoint.root) == (len(leaves), root(leaves))
    assert len(leaves) == len(set(leaves)) == 15
    result = verify(url)
    assert (result.exit_code, result.checkpoints[0].receipts, result.checkpoints[0].uncovered) == (Exit.OK, 15, 0)
