"""Token statistics self-attention: causal, and bidirectional for encoders. Linear time and a state of constant size."""
