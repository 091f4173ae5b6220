"""Evaluation of a trained model: held-out text, zero-shot protocols, retrieval, generation and the report."""
