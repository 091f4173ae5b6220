"""Slot memory and other mixers, compared at equal parameters: see `benchmarks.forms.__main__`."""
