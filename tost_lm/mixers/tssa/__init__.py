"""Token statistics self-attention, causal, and bidirectional for images. Linear time and a state of constant size."""
