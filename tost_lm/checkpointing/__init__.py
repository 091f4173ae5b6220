"""Checkpoints: their format, reader, writer, and the run folder with its lock."""
