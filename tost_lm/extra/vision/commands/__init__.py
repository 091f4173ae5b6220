"""The commands of `tost vision`: image classifiers are trained and evaluated with `tost_lm.extra.vision`."""
