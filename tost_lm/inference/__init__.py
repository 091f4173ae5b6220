"""Parts of programs that run a trained model: scoring, generation, texts of any length, ranks of an evaluation."""
