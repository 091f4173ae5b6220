"""Models that are no language models: the released image classifiers."""
