"""Programs that measure time and memory: thin, what they share is in `benchmarks.measure`."""
