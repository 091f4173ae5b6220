"""The commands of `tost prepare`: a corpus becomes a tokenizer and token shards."""
