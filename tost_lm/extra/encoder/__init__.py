"""The bidirectional encoder of documents and images (docs/encoder.md)."""
