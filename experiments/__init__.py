"""Experiments with the library, which they use as any program of a user would. `python -m experiments.NAME` runs one in
a checkout; docs/experiments.md has their results."""
