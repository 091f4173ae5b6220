"""Token statistics self-attention, causal. Linear time and a state of constant size."""
