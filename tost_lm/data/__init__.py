"""Corpus sources, tokenizers, the format of token shards (reader and writer), and batches."""
