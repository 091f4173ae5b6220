"""Long-Range Arena: the tasks, encoders trained on them, and a table of accuracies."""
