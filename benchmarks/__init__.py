"""Programs that measure time and memory. They share `benchmarks.measure`; `python -m benchmarks.NAME` runs one."""
