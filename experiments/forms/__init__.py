"""Slot memory and other mixers, compared at equal parameters: see `experiments.forms.__main__`."""
