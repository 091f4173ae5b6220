"""Evaluation of a trained model: held-out score, byte n-gram baselines, needle grid, generation and the report."""
