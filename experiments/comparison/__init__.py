"""The layers of the package compared on books, each trained by `tost train`: docs/experiments.md."""
