"""Image classifiers of the Token Statistics Transformer: weights, fine-tuning and analysis."""
