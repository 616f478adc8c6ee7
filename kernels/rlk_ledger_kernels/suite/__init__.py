"""The suites that prove an operator: invariance (T1 to T7), accuracy, parity and golden bits.

Every operator's folder holds `cases.py` with `cases()`; the suites, `rlk-ledger kernels check` and the tests find it.
"""
