"""What all tests share."""

from hypothesis import settings

settings.register_profile("without a clock", deadline=None)
settings.load_profile("without a clock")
"""A busy machine is not a failure."""
