"""Overlap of test sets with the training text of a run or a shard folder."""
