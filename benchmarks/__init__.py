"""Programs that measure time and memory, a file each: settings, table, and the calls that it measures, which run in
processes of their own. They share `benchmarks.measure`."""
