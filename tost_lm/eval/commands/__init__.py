"""The commands of `tost eval`: a trained model is evaluated with `tost_lm.eval`."""
