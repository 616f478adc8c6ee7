"""Sum over active tokens divided by their global count; never a mean of means."""
