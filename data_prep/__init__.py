"""Programs that turn a corpus into a tokenizer and token shards."""
