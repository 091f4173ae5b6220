"""The commands of `tost`, a module each."""
