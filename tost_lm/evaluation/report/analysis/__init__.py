"""Report sections about the results of `eval.analyze`."""
