"""Commands of pre-training, a module each."""
