"""Forms of token statistics that remember, compared at equal parameters: see `benchmarks.forms.__main__`."""
