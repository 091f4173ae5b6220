"""Use of the context: copying, gain per token, many-shot mapping and answers from passages, each with controls."""
