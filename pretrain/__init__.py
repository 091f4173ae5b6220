"""Launchers for a checkout: `python -m pretrain.train` runs `tost train`, and so on."""
