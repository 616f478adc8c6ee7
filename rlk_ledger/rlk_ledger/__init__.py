"""rlk-ledger: record what both engines of an RL run did, verify the record, name the drift.

    import rlk_ledger

    rlk_ledger.init("s3://bucket/rl", run_id="r42", role="rollout")
    rlk_ledger.record("rollout.sample", sample_id="s0", response_token_ids=[1, 2], loss_mask=[1, 1])
    led = rlk_ledger.open("s3://bucket/rl")

Everything is loaded when first used: importing this package imports no torch, numpy, pyarrow, duckdb or fsspec.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlk_ledger.ledger import open_ledger as open  # noqa: A004
    from rlk_ledger_schemas import errors, events
    from rlk_ledger_schemas.fingerprints import contract_id, mask_digest, token_digest
    from rlk_ledger_sdk.admission import admit
    from rlk_ledger_sdk.api import close, current, flush, init, mode, record
    from rlk_ledger_sdk.diagnostics import diagnose
    from rlk_ledger_sdk.scope import scope
    from rlk_ledger_sdk.weights import state_digest

__all__ = [
    "admit",
    "close",
    "contract_id",
    "current",
    "diagnose",
    "errors",
    "events",
    "flush",
    "init",
    "mask_digest",
    "mode",
    "open",
    "record",
    "scope",
    "state_digest",
    "token_digest",
]

# public name -> (module, name in it); no name means the module itself
_PLACES: dict[str, tuple[str, str | None]] = {
    "init": ("rlk_ledger_sdk.api", "init"),
    "record": ("rlk_ledger_sdk.api", "record"),
    "flush": ("rlk_ledger_sdk.api", "flush"),
    "close": ("rlk_ledger_sdk.api", "close"),
    "current": ("rlk_ledger_sdk.api", "current"),
    "mode": ("rlk_ledger_sdk.api", "mode"),
    "admit": ("rlk_ledger_sdk.admission", "admit"),
    "diagnose": ("rlk_ledger_sdk.diagnostics", "diagnose"),
    "scope": ("rlk_ledger_sdk.scope", "scope"),
    "state_digest": ("rlk_ledger_sdk.weights", "state_digest"),
    "contract_id": ("rlk_ledger_schemas.fingerprints", "contract_id"),
    "token_digest": ("rlk_ledger_schemas.fingerprints", "token_digest"),
    "mask_digest": ("rlk_ledger_schemas.fingerprints", "mask_digest"),
    "errors": ("rlk_ledger_schemas.errors", None),
    "events": ("rlk_ledger_schemas.events", None),
    "open": ("rlk_ledger.ledger", "open_ledger"),
}


def __getattr__(name: str) -> Any:
    place = _PLACES.get(name)
    if place is None:
        raise AttributeError(f"module 'rlk_ledger' has no attribute {name!r}")
    import importlib

    module = importlib.import_module(place[0])
    if place[0].startswith("rlk_ledger_sdk"):
        from rlk_ledger import hooks
        from rlk_ledger_sdk.hooks import install

        install(hooks)
    value = module if place[1] is None else getattr(module, place[1])
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
