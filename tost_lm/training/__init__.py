"""The pre-training run: settings, run folder, checkpoints, metrics and the loop."""
