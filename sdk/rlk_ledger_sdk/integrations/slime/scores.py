"""Training-side log-probabilities as events: one a sample and rank, with its shard under context parallelism."""

from collections.abc import Mapping, Sequence
from typing import Any

from rlk_ledger_schemas.errors import EventError
from rlk_ledger_sdk.api import current, record
from rlk_ledger_sdk.declared import declare
from rlk_ledger_sdk.integrations.slime.batch import Row
from rlk_ledger_sdk.integrations.slime.host import on_host
from rlk_ledger_sdk.integrations.slime.parallel import Rank


def record_scores(
    name: str,
    rows: Sequence[Row],
    values: Sequence[Any],
    source: str,
    contract: Mapping[str, Any],
    rank: Rank,
    version: str | None,
    pass_id: str,
) -> None:
    """Records the values of one pass; a row whose count differs from the positions it owns is refused by a sentence."""
    contract_id = declare("logprob", contract)
    metadata = {"weight_version": "absent" if version is None else "derived"}
    for row, one in zip(rows, on_host(list(values))):
        if len(one) != row.held:
            error = EventError(
                f"{name}: {source} has {len(one)} log-probabilities of sample {row.sample_id} for the {row.held} "
                f"positions this rank owns; they are not recorded."
            )
            current().rejected("logprobs", error)
            continue
        if not row.response:
            continue
        fields: dict[str, Any] = {"sample_id": row.sample_id, "source": source, "values": one}
        if rank.cp_size > 1:
            shard = {"axis": "sequence", "rank": rank.cp, "world_size": rank.cp_size, "ranges": row.ranges}
            fields["shard"] = shard
        if version is not None:
            fields["weight_version"] = version
        if row.mask_digest is not None:
            fields["mask_digest"] = row.mask_digest
        record(
            "logprobs",
            **fields,
            contract_id=contract_id,
            pass_id=pass_id,
            token_digest=row.token_digest,
            metadata_source=metadata,
        )


def training_contract(args: Any, data: Mapping[str, Any], dtype: str | None) -> dict[str, Any]:
    """What a Megatron log-prob pass of the framework computes.

    Logits are float32 and divided by rollout_temperature; top-p enters only where the kept ids are replayed.
    """
    if dtype is None:
        dtype = "bfloat16" if getattr(args, "bf16", False) else "float16" if getattr(args, "fp16", False) else None
    body: dict[str, Any] = {
        "mode": "processed",
        "alignment": "token_i_given_before_i",
        "execution_path": "full_prefill",
    }
    body["temperature"] = getattr(args, "rollout_temperature", None)
    body["logits_dtype"], body["compute_dtype"] = "float32", dtype
    if data.get("rollout_top_p_token_ids") is not None:
        body["top_p"] = getattr(args, "rollout_top_p", None)
    return body
