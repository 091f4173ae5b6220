"""Runs `tost preflight`."""

from tost_lm.cli.preflight import run

if __name__ == "__main__":
    run()
