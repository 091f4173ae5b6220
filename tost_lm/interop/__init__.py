"""Interfaces to other libraries and checkpoint formats."""
