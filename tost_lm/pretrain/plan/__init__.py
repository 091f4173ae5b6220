"""The resource plan of a training: memory, time and layouts from formulas."""
