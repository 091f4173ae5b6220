"""In a checkout, `python -m data_prep COMMAND …` runs `tost prepare COMMAND …`, for example `shards`."""

from tost_lm.cli.main import main

main("prepare")
