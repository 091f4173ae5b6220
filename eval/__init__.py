"""Programs that evaluate a trained model with `tost_lm.evaluation`."""
