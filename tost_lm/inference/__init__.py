"""What runs a trained model: scoring, generation, texts of any length, and the ranks of an evaluation."""
