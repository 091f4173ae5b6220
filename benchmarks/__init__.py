"""Programs that measure time and memory. NAME.py has settings and tables, and answers --help without torch.
NAME_cells.py has what it measures. They share `benchmarks.measure`."""
