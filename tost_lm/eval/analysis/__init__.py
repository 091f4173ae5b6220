"""Analyses of the TSSA layers of a trained model.

Each has a module with `measure`, which returns its results.json, and `section`, which shows that in a report.
"""
