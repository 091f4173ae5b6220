"""What token mixers share: layouts of documents and sequence shards, exchanges between sequence ranks, positions,
initial values, and the loss of a large vocabulary."""
