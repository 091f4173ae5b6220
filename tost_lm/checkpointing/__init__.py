"""Checkpoints: what they contain, and how they are written, kept and read."""
