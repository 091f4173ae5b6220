"""The only place that knows of ranks: process groups and DeepSpeed."""
