"""Tasks: the ways to measure a model. Each file holds a family whole, and `registry` lists the families."""
