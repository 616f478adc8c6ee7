"""Operators: one folder each, one file per backend (`reference`, `torch`, `triton`)."""
