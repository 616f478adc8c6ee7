"""Causal grouped-query attention over a paged KV cache; prefill, chunks and decode are one operator."""
