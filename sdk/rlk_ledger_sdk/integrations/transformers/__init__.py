"""transformers: one model attached, what it is, what it generated, what it scored, which weights it held."""

from rlk_ledger_sdk.integrations.transformers.attached import Attached, attach
from rlk_ledger_sdk.integrations.transformers.callback import trainer_callback, version_of
from rlk_ledger_sdk.integrations.transformers.generation import (
    Drawn,
    Generated,
    Generation,
    generation_of,
    record_generation,
)
from rlk_ledger_sdk.integrations.transformers.held import held_tensors
from rlk_ledger_sdk.integrations.transformers.listening import Listener, listening
from rlk_ledger_sdk.integrations.transformers.scoring import (
    Response,
    packed_responses,
    record_layout,
    record_scores,
    responses_of,
    token_logprobs,
)

__all__ = [
    "Attached",
    "Drawn",
    "Generated",
    "Generation",
    "Listener",
    "Response",
    "attach",
    "generation_of",
    "held_tensors",
    "listening",
    "packed_responses",
    "record_generation",
    "record_layout",
    "record_scores",
    "responses_of",
    "token_logprobs",
    "trainer_callback",
    "version_of",
]
