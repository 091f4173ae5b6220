"""In a checkout, `python -m pretrain COMMAND …` runs `tost COMMAND …`, for example `train`."""

from tost_lm.cli.main import main

main()
