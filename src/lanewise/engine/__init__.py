"""The step: units, sums, exchanges, strategies. Knows nothing of loops, files or command lines."""
