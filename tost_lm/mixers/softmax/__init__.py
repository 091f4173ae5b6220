"""Softmax attention, full or in a sliding window."""
