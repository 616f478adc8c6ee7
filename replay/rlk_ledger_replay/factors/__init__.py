"""Factors: one file each, found by name here and by the entry point group `rlk_ledger.factors`.

A factor is one decision of the arithmetic that two engines may take differently. Adding one adds a file that defines
`FACTOR`; nothing else changes. Imports nothing.
"""
