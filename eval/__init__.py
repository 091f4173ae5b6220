"""Launchers for a checkout: `python -m eval.zero_shot` runs `tost eval zero-shot`, and so on."""
