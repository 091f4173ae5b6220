"""Token mixers, a folder each."""
