"""Runs `tost plan`."""

from tost_lm.cli.plan import run

if __name__ == "__main__":
    run()
