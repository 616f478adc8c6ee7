"""Rows of a table, copied exactly."""
