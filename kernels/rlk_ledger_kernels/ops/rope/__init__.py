"""Rotary position embedding, half-rotation form."""
