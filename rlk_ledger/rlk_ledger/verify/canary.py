"""The objects of the put-if-absent probe, and what the probe found."""

from rlk_ledger import layout
from rlk_ledger.canary import NAMES, check_canary, path_of
from rlk_ledger.store import Missing, Store
from rlk_ledger.verify.finding import Finding, finding
from rlk_ledger_schemas.errors import FormatError
from rlk_ledger_schemas.objects import LedgerInfo, RunInfo

_OVERWRITES = "the store overwrote objects it was told to create only: shippers could replace each other's receipts"


def check_canaries(store: Store) -> list[Finding]:
    """A finding for every object below `canary/` that is none, or was changed."""
    found = []
    for name in store.children(layout.CANARY):
        path = path_of(name)
        try:
            if name not in NAMES:
                raise FormatError(f"{path}: the put-if-absent probe writes no such object.")
            check_canary(name, store.read(path))
        except Missing:
            continue
        except FormatError as error:
            found.append(finding("canary.changed", path, str(error).removeprefix(f"{path}: ").rstrip(".")))
    return found


def check_promise(info: LedgerInfo | RunInfo | None, path: str) -> list[Finding]:
    """The finding for a ledger or a run begun on a store that ignored put-if-absent."""
    if info is None or info.put_if_absent != "ignored":
        return []
    return [finding("store.overwrites", path, _OVERWRITES)]
