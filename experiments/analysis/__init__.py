"""Analyses of the TSSA layers of a trained model.

Each has a module with `measure`, which returns its results, and `section`, which shows them on the page.
"""
