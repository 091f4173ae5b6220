"""Parallel layouts of a model, its collectives, the launcher, and the watchdog over ranks."""
