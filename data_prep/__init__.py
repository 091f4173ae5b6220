"""Launchers for a checkout: `python -m data_prep.build_shards` runs `tost prepare shards`, and so on."""
