"""A run as its user meets it: start, prepare, steps, digest."""
