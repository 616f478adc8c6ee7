"""Measures the audit's promised rate (at most 2 of 200 clean runs raise any finding) and the power it keeps."""
