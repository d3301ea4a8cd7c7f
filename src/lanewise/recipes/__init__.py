"""Training without a line of Python: a recipe in TOML, and what it comes to."""
