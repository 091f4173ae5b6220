"""Slot memory: a memory of slots that tokens are written to and read from, with a state of constant size."""
