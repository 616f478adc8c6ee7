"""The commands of `rlk-ledger`, one module a theme; found by entry point."""
