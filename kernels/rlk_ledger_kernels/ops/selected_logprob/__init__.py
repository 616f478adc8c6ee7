"""Log-probability of one chosen token per row, without the [rows, vocabulary] intermediate."""
