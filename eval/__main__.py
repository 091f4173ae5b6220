"""In a checkout, `python -m eval COMMAND …` runs `tost eval COMMAND …`, for example `zero-shot`."""

from tost_lm.cli.main import main

main("eval")
