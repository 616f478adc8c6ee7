"""The demo: a rollout engine and a training engine that share a small model, record, and are then judged.

Life of a demo. `flow` prepares a folder and starts two processes (`engines`): `rollout` generates with a KV cache in
bf16, `training` re-scores the same tokens by full forward, learns from them with a clipped policy gradient and
publishes weights that `rollout` loads. They exchange files (`exchange`) and record through the SDK alone. Then the
ledger is verified, audited and replayed, and a report is written. A fault (`faults`) makes one side's arithmetic,
mask or weights really wrong; what that side declares stays true wherever a declaration could tell.
"""
