"""The integrations under their public names, with a shipper lent to the recorder they use."""

from rlk_ledger import hooks
from rlk_ledger_sdk.hooks import install

install(hooks)
