"""Models and measurements beside language models: image classifiers and the tasks of Long-Range Arena."""
