"""One process of a distributed decoder: scores samples under several layouts and writes what it got.

Usage: python decoder_rank.py RANK WORLD STORE JOB ANSWER. JOB, written with torch.save: config, tensors,
numerics, samples, layouts. ANSWER: per layout (prefill, decode, chunked scores, collectives).
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist

from rlk_ledger_kernels.parallel.mesh import distributed_mesh
from rlk_ledger_replay.decoder import Decoder


def main(rank: int, world: int, store: str, job_file: str, answer_file: str) -> None:
    """Join the group, score, leave."""
    torch.set_num_threads(1)
    job = torch.load(job_file, weights_only=False)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    answers = []
    for layout in job["layouts"]:
        mesh = distributed_mesh(layout.tp, layout.cp)
        decoder = Decoder.from_tensors(job["config"], job["tensors"], job["numerics"], layout=layout, mesh=mesh)
        ids, start = job["samples"][0]
        answers.append(
            (
                decoder.prefill_logprobs_batch(job["samples"]),
                decoder.decode_logprobs_batch(job["samples"]),
                decoder.chunked(ids, start, [3, 17, 64]),
                decoder.collectives,
            )
        )
    torch.save(answers, answer_file)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
