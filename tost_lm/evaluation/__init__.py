"""Evaluation of trained models: held-out text, zero-shot protocols, retrieval, generation and the report."""
