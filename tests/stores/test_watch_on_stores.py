"""`watch` on a bucket: what is shipped between two looks is read at the second, and only that."""

import numpy as np
from store_servers import Server

from rlk_ledger.build import build, event
from rlk_ledger.ledger import open_ledger
from rlk_ledger.watching import Watch


def test_a_watch_follows_a_run_in_a_bucket(server: Server, name: str) -> None:
    url = server.url(name)
    values = np.full(4, -0.5, np.float32)
    watched = None
    for step in range(3):
        body = {"sample_id": f"s{step}", "step": step}
        told = event("r1", "w", 2 * step, "rollout.sample", **body, response_token_ids=[1, 2, 3, 4], loss_mask=[1] * 4)
        scored = event("r1", "w", 2 * step + 1, "logprobs", **body, source="training", values=values, contract_id="c")
        build(url, "r1", [told, scored])
        watched = watched or Watch(open_ledger(url), "r1")
        assert watched.look()
        assert (watched.state.trouble, watched.state.samples, watched.state.training_step) == (None, step + 1, step)
    assert watched is not None
    assert not watched.look()
