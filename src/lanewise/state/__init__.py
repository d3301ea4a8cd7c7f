"""The state of a run in files: by slots, with a hash for every piece, published whole or not at all."""
