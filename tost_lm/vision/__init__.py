"""Fine-tuning and evaluation of image classifiers, in one process."""
