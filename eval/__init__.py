"""Programs that evaluate a trained model: thin, the work is in `tost_lm.evaluation`."""
