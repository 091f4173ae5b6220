"""Report sections about the results of `tost eval analyze`."""
