"""Analysis of trained TSSA layers."""
