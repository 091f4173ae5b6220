"""Shared by token mixers: layouts of documents and sequence shards, exchanges between sequence ranks, positions,
initial values, and the loss of a large vocabulary."""
