"""What the operator does in a trained model."""
