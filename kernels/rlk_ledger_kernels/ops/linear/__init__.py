"""Matrix product with a weight stored as [out, in]."""
