"""Operators: one folder each, one file per backend (`reference`, `tiled`)."""
