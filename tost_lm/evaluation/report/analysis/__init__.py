"""Sections about what `eval.analyze` found in the TSSA layers of a run."""
