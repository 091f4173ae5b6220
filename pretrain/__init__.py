"""Programs that train. Run from a checkout; they import `tost_lm` and nothing imports them."""
